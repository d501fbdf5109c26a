"""Recorded episodes of a run directory: chosen by name, shown, and played again by the command line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agents.players.scripted import ScriptedPlayer
from coordinator.app.recorded import Selection
from coordinator.app.rundir import RunDirectoryError
from coordinator.cli.main import app
from scenarios import Identity, load_scenario, play_episode, write_recordings
from tinker.protocol.values import EpisodeId, Phase, SeatName

SCENARIO = '''
import random

from scenarios import Scores, Table, scenario


def parse(text):
    if text not in ("yes", "no"):
        raise ValueError("say yes or no")
    return text


@scenario("ann", "bob", version=1, baselines={})
async def talk(table: Table) -> Scores:
    """Two say yes or no."""
    number = table.rng.randrange(100)
    table["ann"].hear("ann alone hears this")
    said = await table.act_all(f"number {number}. yes or no?", parse)
    for seat, word in said.items():
        table.say(seat, f"{seat} said {word}")
    await table["ann"].act("and now?", parse)
    return {"ann": 1.0, "bob": 0.0}
'''
RANDOM = SCENARIO.replace("table.rng.randrange(100)", "random.randrange(100)")


class Never:
    async def open(self, number: int, needs: object) -> dict[SeatName, object]:
        raise AssertionError("scripted players need no turn")


async def record(run: Path, source: str = SCENARIO) -> Path:
    """A run directory with two rounds of two episodes, and an evaluation before them."""
    (run / "recordings").mkdir(parents=True)
    (run / "talk.py").write_text(source)
    (run / "config.toml").write_text(f'scenario = "{run / "talk.py"}"\n')
    talk = load_scenario(str(run / "talk.py"))
    for round, phase in [(0, Phase.EVALUATE), (1, Phase.ROLLOUT), (2, Phase.ROLLOUT)]:
        played = []
        for index in range(2):
            players = {
                SeatName(seat): ScriptedPlayer(
                    lambda heard, prompt, rng: rng.choice(("yes", "no")), random.Random(index)
                )
                for seat in talk.seats
            }
            identity = Identity("run", EpisodeId(round, phase, index))
            played.append(
                await play_episode(
                    talk, players, Never(), identity=identity, rng_seed=index, params={}, clock=lambda: 0.0
                )  # type: ignore[arg-type]
            )
        path = run / "recordings" / f"{phase}-{round:04d}.jsonl"
        write_recordings(path, [episode.recording for episode in played])
    return run


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return await record(tmp_path / "run")


@pytest.fixture
async def unfair(tmp_path: Path) -> Path:
    """Its scenario uses randomness that is not its table's."""
    return await record(tmp_path / "run", RANDOM)


def chosen(text: str, *, all: bool = False) -> list[str]:
    return [str(each.episode) for each in Selection.parse(text).recordings(all=all)]


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_name_means_an_episode_a_phase_or_a_round(run: Path) -> None:
    assert chosen(f"{run}") == ["2/rollout/0", "2/rollout/1"]
    assert chosen(f"{run}", all=True) == [
        "0/evaluate/0", "0/evaluate/1", "1/rollout/0", "1/rollout/1", "2/rollout/0", "2/rollout/1"
    ]  # fmt: skip
    assert chosen(f"{run}:1") == chosen(f"{run}:1/rollout") == ["1/rollout/0", "1/rollout/1"]
    assert chosen(f"{run}:2/rollout/1,0/evaluate/0") == ["0/evaluate/0", "2/rollout/1"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("3", "no episode 3; its rounds are 0 to 2"), ("1/rollout/2", "no episode 1/rollout/2"), ("one", "names no episode"),
     ("1/rollout/0,1/update", "no episode 1/update")],
)  # fmt: skip
def test_an_episode_that_is_not_there_is_named(run: Path, name: str, says: str) -> None:
    with pytest.raises(RunDirectoryError, match=says):
        chosen(f"{run}:{name}")


def test_a_place_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert call("replay", tmp_path).exit_code == 2
    with pytest.raises(RunDirectoryError, match="no run directory"):
        chosen(f"{tmp_path}:1")


def test_every_episode_takes_the_same_course_again(run: Path) -> None:
    result = call("replay", run, "--all")
    assert (result.exit_code, result.output) == (0, "6 episodes took the same course again\n")


def test_randomness_that_is_not_the_tables_is_found_and_shown_in_words(unfair: Path) -> None:
    random.seed(4711)
    result = call("replay", f"{unfair}:1/rollout/0")
    assert result.exit_code == 1
    first, *words, last = result.output.splitlines()
    assert first.startswith("1/rollout/0: seat ann, turn 0: the recording has ask 'number ")
    assert words[0] == "  ann hears: ann alone hears this"
    assert last == "1 of 1 episodes took another course"


def test_a_changed_rule_is_found_where_it_first_matters(run: Path) -> None:
    (run / "talk.py").write_text(SCENARIO.replace('"ann": 1.0', '"ann": 0.5'))
    result = call("replay", run)
    assert result.exit_code == 1
    assert "seat ann, turn 1: the recording has score 1.0, the replay score 0.5" in result.output
    assert result.output.endswith("2 of 2 episodes took another course; the others: 2/rollout/1\n")


def test_a_scenario_that_has_moved_is_named_by_an_option(run: Path) -> None:
    moved = (run / "talk.py").rename(run / "moved.py")
    assert call("replay", run).exit_code == 2
    assert call("replay", run, "--scenario", moved).exit_code == 0


def test_an_episode_is_shown_as_one_seat_knew_it(run: Path) -> None:
    everything = call("show", f"{run}:1/rollout/0").output
    bob = call("show", f"{run}:1/rollout/0", "--seat", "bob").output
    assert "ann alone hears this" in everything
    assert "ann alone hears this" not in bob
    assert "bob is asked" in bob
    assert "ann is asked" not in bob
    assert call("show", f"{run}:1/rollout/0", "--seat", "carl").exit_code == 2


def test_a_run_alone_is_shown_as_a_list_of_its_last_phase(run: Path) -> None:
    assert call("show", run).output.splitlines() == [
        "2/rollout/0  finished  ann 1, bob 0",
        "2/rollout/1  finished  ann 1, bob 0",
    ]
