"""Real processes: the coordinator is killed in the middle of a phase and started again with its journal."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from system_processes import SCRIPTED, Machine, Program, machine, wait_until

pytestmark = pytest.mark.timeout(240)

ROUNDS = 20
SHORT = ("--rounds", str(ROUNDS), "--set", "evaluate_every=0", "--set", "groups=2", "--set", "group_size=2")
# Every answer is trained on, and often: without it equal rewards would leave nothing to update, and the phase could not be met.
LONG_UPDATES = ("--set", "learning.entropy=0.01", "--set", "learning.epochs=20")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def start(here: Machine, bind: str) -> Program:
    return here.start("coordinator", "--bind", bind, "--journal", "journal", "--http", "127.0.0.1:0")


def runs(coordinator: Program) -> list[dict[str, Any]]:
    """What the coordinator's status page says of its runs."""
    page = json.loads(coordinator.out.read_text().splitlines()[0])["http"]
    with urllib.request.urlopen(f"{page}/status.json", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["runs"]
    return found


def stop_within(phase: str, here: Machine, coordinator: Program, server: Program, host: Program) -> None:
    """Stop the task server while the run is inside this phase."""

    def inside() -> bool:
        assert not host.over, host.story()
        server.signal(signal.SIGSTOP)
        if [(run["phase"], run["edge"]) for run in runs(coordinator)] == [(phase, "end")]:
            return True
        server.signal(signal.SIGCONT)
        time.sleep(0.005)  # another moment
        return False

    wait_until(lambda: bool(here.rows()) or host.over, host.story)
    wait_until(inside, host.story)


@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_run_survives_a_coordinator_that_is_killed_within_a_phase(here: Machine, phase: str) -> None:
    coordinator = start(here, "tcp://127.0.0.1:0")
    address = coordinator.ready()
    server = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    server.ready()
    host = here.start("run", "guess", "--coordinator", address, *SHORT, *LONG_UPDATES, "--out", "run")
    stop_within(phase, here, coordinator, server, host)
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    rounds = len(here.rows())
    again = start(here, address)
    server.signal(signal.SIGCONT)
    assert again.ready() == address
    assert host.wait() == 0, host.story() + again.story()

    assert 0 < rounds < 2 * ROUNDS
    told = [(row["round"], row["agent"]) for row in here.rows()]
    assert told == [(round, agent) for round in range(1, ROUNDS + 1) for agent in ("hinter", "guesser")]
    assert "epoch=2" in again.err.read_text()
    again.signal(signal.SIGTERM)
    assert again.wait() == 0, again.story()
    checked = here.start("journal", "check", "journal")
    assert checked.wait() == 0, checked.story()
    assert "2 segments lead to the same states and messages; epoch 2" in checked.out.read_text()
    for each in (again, server, host):
        assert "Traceback" not in each.err.read_text()


def test_two_coordinators_never_share_a_journal(here: Machine) -> None:
    first = start(here, "tcp://127.0.0.1:0")
    first.ready()
    second = start(here, "tcp://127.0.0.1:0")
    assert second.wait() == 2
    assert "another coordinator has the journal journal open; stop it first" in second.err.read_text()
    assert "Traceback" not in second.err.read_text()
