"""Task servers that are killed while they update: the run goes on, and what it has learned is what it would have learned undisturbed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_processes import SCRIPTED, Machine, Program, machine, wait_until

pytestmark = pytest.mark.timeout(240)
PROGRAM = str(Path(__file__).with_name("dying_taskserver.py"))
RUN = ("dilemma", "--rounds", "3", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")
LEARNS = ("--set", "learning.algorithm='reinforce'", "--set", "learning.every=1", "--set", "learning.epochs=2")
REPLIES = ("--reply", "cooperate", "--reply", "defect")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def adapters(place: Path) -> dict[str, bytes]:
    """Every published adapter, by path."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*.safetensors"))
        if not path.parent.is_symlink()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with machine(tmp_path_factory.mktemp("undisturbed")) as made:
        address, _ = coordinator(made)
        server(made, address, "--name", "whole")
        finish(made, play(made, address))
        return adapters(made.place / "run/adapters")


def coordinator(here: Machine) -> tuple[str, Program]:
    program = here.start("coordinator", "--bind", "tcp://127.0.0.1:0")
    return program.ready(), program


def server(here: Machine, address: str, *arguments: str, dies: tuple[str, int] | None = None) -> Program:
    """A task server that has joined; `dies`: the point at which it kills itself."""
    command = ("taskserver", "--coordinator", address, *SCRIPTED, *REPLIES, "--state", "state", *arguments)
    point = () if dies is None else (PROGRAM, dies[0], str(dies[1]))
    program = here.python(*point, *command) if dies else here.start(*command)
    program.ready()
    return program


def play(here: Machine, address: str) -> Program:
    return here.start("run", *RUN, *LEARNS, "--coordinator", address, "--out", "run")


def finish(here: Machine, run: Program) -> None:
    assert run.wait() == 0, run.story()
    assert here.exit()["reason"] == "finished"
    rows = here.rows()
    assert [row["round"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert all(row["stepped"] == 1.0 and "count/refused_updates" not in row for row in rows), rows


@pytest.mark.parametrize("point", ["gradient", "gradient done", "step done", "committed"])
def test_another_update_worker_on_the_same_directory_takes_over(
    here: Machine, undisturbed: dict[str, bytes], point: str
) -> None:
    address, _ = coordinator(here)
    dying = server(here, address, "--pool", "update", "--name", "first", dies=(point, 6))
    server(here, address, "--pool", "rollout:8", "--name", "plays")
    server(here, address, "--pool", "update", "--name", "second")
    run = play(here, address)
    assert dying.wait() == -signal.SIGKILL
    finish(here, run)
    assert adapters(here.place / "run/adapters") == undisturbed


def test_the_same_one_goes_on_when_it_is_started_again(here: Machine, undisturbed: dict[str, bytes]) -> None:
    """It also plays: the adapters in use are loaded into it again before a turn goes to it."""
    address, _ = coordinator(here)
    dying = server(here, address, "--name", "only", dies=("publish", 6))
    run = play(here, address)
    assert dying.wait() == -signal.SIGKILL
    server(here, address, "--name", "only")
    finish(here, run)
    assert adapters(here.place / "run/adapters") == undisturbed


def test_a_run_that_nobody_updates_any_more_ends_after_its_deadline_and_says_so(here: Machine) -> None:
    address, _ = coordinator(here)
    dying = server(here, address, dies=("step", 1))
    run = here.start("run", *RUN, "--coordinator", address, "--out", "run", "--set", "worker_deadline=1")
    assert dying.wait() == -signal.SIGKILL
    assert run.wait() == 3, run.story()
    assert "worker" in here.exit()["detail"] and "no other has come in" in here.exit()["detail"]
    wait_until(lambda: run.over, run.story)
