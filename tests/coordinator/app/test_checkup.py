"""`opentinker check` finds what is planted in a scenario, and nothing in one that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli.main import app
from scenarios.library import library

GOOD = '''
import asyncio, os, random, time
from datetime import datetime

from scenarios import Scores, Table, scenario

KEPT = []


def number(text):
    if not text.isdecimal() or int(text) > 4:
        raise ValueError("say a number from 0 to 4")
    return int(text)


def guesser(heard, prompt, rng):
    return str(rng.randrange(5))


@scenario("holder", "seeker", version=1, private=["holder"], baselines={"holder": guesser, "seeker": guesser})
async def find(table: Table, *, tries: int = 2) -> Scores:
    """The holder sees a number, the seeker looks for it."""
    secret = table.rng.randrange(5)
    table["holder"].hear(f"it is {secret}")
    found = False
    for _ in range(tries):
        said = await table["seeker"].act("which number?", number)
        word = await table["holder"].act(f"they say {said}", number)
        table["seeker"].hear(f"they say {word}")
        found = found or said == secret
    return {"holder": 0.0, "seeker": float(found)}
'''

PLANTED = {
    "global random numbers": ("table.rng.randrange(5)", "random.randrange(5)", "depends on Python's global random numbers"),
    "the time of day": ("table.rng.randrange(5)", "int(time.time() / 1000) % 5", "depends on the clock"),
    "a date": ("table.rng.randrange(5)", "datetime.now().year % 5", "depends on the clock"),
    "the order of a set": (
        "table.rng.randrange(5)", "int(next(iter({f'{n}' for n in range(5)})))", "depends on the order of a set"
    ),
    "something kept between episodes": (
        "table.rng.randrange(5)", "KEPT.append(0) or len(KEPT) % 5", "depends on the order of the episodes"
    ),
    "randomness that nobody seeds": (
        "table.rng.randrange(5)", "os.urandom(1)[0] % 5", "the same seed gives another episode each time"
    ),
    "a secret that is shown": ('"which number?"', 'f"which number? ({secret})"', "seeker can see what holder alone should know"),
    "a secret in other words": (
        '"which number?"', 'f"which? not {secret + 5}"', "seeker can see what holder alone should know"
    ),
    "a score for a stranger": ('"seeker": float(found)', '"finder": float(found)', "20 of 20 episodes failed"),
    "a score that is missing": (', "seeker": float(found)', "", "20 of 20 episodes failed"),
    "no end": ("for _ in range(tries)", "while True", "max_turns"),
    "no end without a turn": ("found = False\n", "while True: pass\n", "the episode of seed 0 was not over after"),
    "a baseline that is refused": ("str(rng.randrange(5))", "str(rng.randrange(9))", "with its baselines were forfeited"),
    "texts beyond the context": ('"which number?"', '"which number? " * 500', "do not fit into the model's context"),
    "an error in rare cases": ("found = False\n", "found = 1 / secret\n", "ZeroDivisionError"),
    "an exit": ("found = False\n", "found = os._exit(7)\n", "the episode of seed 0 ended its process: exit code 7"),
}  # fmt: skip


def check(tmp_path: Path, source: str, *options: str) -> Result:
    path = tmp_path / "find.py"
    path.write_text(source)
    return CliRunner().invoke(app, ["check", str(path), *options])


@pytest.mark.parametrize("name", library())
def test_nothing_is_found_in_the_library(name: str) -> None:
    result = CliRunner().invoke(app, ["check", name, "--seeds", "10"])
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, f"{name}: no problems found")


def test_nothing_is_found_in_a_scenario_that_is_right(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD, "--set", "params.tries=3")
    assert (result.exit_code, result.output) == (0, "find: no problems found\n")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.app.checkup.PATIENCE", 10.0)
    old, new, says = PLANTED[fault]
    assert old in GOOD
    result = check(tmp_path, GOOD.replace(old, new))
    problems = [line for line in result.output.splitlines() if line.startswith("problem: ")]
    assert result.exit_code == 1, result.output
    assert says in "\n".join(problems), result.output


def test_only_the_cause_is_named(tmp_path: Path) -> None:
    """A clock is no order of sets."""
    result = check(tmp_path, GOOD.replace("table.rng.randrange(5)", "int(time.time() / 1000) % 5"))
    assert len([line for line in result.output.splitlines() if line.startswith("problem: an episode depends on")]) == 1


def test_a_tool_that_is_awaited_is_worth_a_note_and_no_more(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD.replace("found = False\n", "found = await asyncio.sleep(0.001, False)\n"))
    assert result.exit_code == 0
    assert "note: it awaits something other than its table at " in result.output
    assert "find.py:25" in result.output


@pytest.mark.parametrize("options", [["--set", "params.trys=3"], ["--set", "rounds=3"], ["--model", "nowhere/at/all"]])
def test_wrong_usage_is_refused_before_anything_is_played(options: list[str], tmp_path: Path) -> None:
    assert check(tmp_path, GOOD, *options).exit_code == 2
