"""A run that has stopped is gone on with, and nothing of it is lost, doubled or different."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from system_processes import Machine, machine
from system_resume import TORCH, differences, go_on, happenings, interrupted, left, play

pytestmark = pytest.mark.timeout(400)
SCRIPTED = ("--engine", "scripted", "--set", "evaluate_every=2", "--set", "learning.algorithm='reinforce'")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    with machine(tmp_path_factory.mktemp("scripted")) as made:
        play(made, "whole", *SCRIPTED)
        return left(made.place / "whole"), happenings(made.place / "whole")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    pytest.importorskip("torch")
    with machine(tmp_path_factory.mktemp("torch")) as made:
        play(made, "whole", *TORCH)
        return left(made.place / "whole"), happenings(made.place / "whole")


def test_a_run_that_was_told_to_stop_goes_on_where_it_was(here: Machine, scripted: tuple[dict[str, Any], int]) -> None:
    expected, total = scripted
    interrupted(here, "run", total // 2, *SCRIPTED, number=signal.SIGINT)
    assert here.exit()["reason"] == "interrupted"
    go_on(here, "run")
    assert differences(expected, left(here.place / "run")) == []
    assert here.exit()["reason"] == "finished"


def test_a_run_can_be_played_on_after_its_last_round(here: Machine, scripted: tuple[dict[str, Any], int]) -> None:
    play(here, "run", *SCRIPTED, "--rounds", "2")
    refused = here.start("run", "--resume", "run")
    assert refused.wait() == 2 and "has played 2 rounds, all it was to play" in refused.err.read_text()
    program = here.start("run", "--resume", "run", "--rounds", "3")
    assert program.wait() == 0, program.story()
    assert differences(scripted[0], left(here.place / "run")) == []
    assert "rounds = 3" in (here.place / "run/config.toml").read_text()


def test_a_run_that_was_cut_off_after_its_last_round_is_finished(here: Machine) -> None:
    play(here, "run", *SCRIPTED, "--rounds", "1")
    (here.place / "run/exit.json").unlink()
    program = here.start("run", "--resume", "run")
    assert program.wait() == 0 and program.err.read_text() == ""
    assert here.exit()["reason"] == "finished"


def test_a_damaged_checkpoint_is_passed_over(here: Machine, scripted: tuple[dict[str, Any], int]) -> None:
    play(here, "run", *SCRIPTED, "--rounds", "2")
    newest = max((here.place / "run/checkpoints/rounds").iterdir())
    newest.write_bytes(newest.read_bytes()[:-5])
    program = here.start("run", "--resume", "run", "--rounds", "3")
    assert program.wait() == 0, program.story()
    assert differences(scripted[0], left(here.place / "run")) == []
    assert "commit refused" in program.err.read_text() + program.out.read_text()


def test_only_one_process_writes_a_run(here: Machine) -> None:
    program = here.run()
    second = here.start("run", "--resume", "run")
    assert second.wait() == 2
    assert "run is being written by another process" in second.err.read_text()
    program.signal(signal.SIGINT)
    assert program.wait() == 0, program.story()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--resume", "nowhere"), "nowhere holds no run"),
        (("guess", "--resume", "nowhere"), "only --rounds and --coordinator may be given"),
        (("--resume", "nowhere", "--set", "learning.lr=1"), "only --rounds and --coordinator may be given"),
        ((), "name a scenario"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(here: Machine, arguments: tuple[str, ...], said: str) -> None:
    program = here.start("run", *arguments)
    assert program.wait() == 2
    assert said in program.err.read_text()


@pytest.mark.train
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_that_was_killed_at_any_moment_ends_with_the_same_bits(
    here: Machine, trained: tuple[dict[str, Any], int], seed: int
) -> None:
    """All of its processes at once, under --deterministic."""
    expected, total = trained
    interrupted(here, "run", random.Random(seed).randint(1, total), *TORCH)
    go_on(here, "run")
    assert differences(expected, left(here.place / "run")) == []
