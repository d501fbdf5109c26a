"""Random histories: honest peers, a bad network and faults, against every invariant after every step (`core_world`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from core_lagging import LaggingHost
from core_world import FURTHER, World

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BLOCK = 60  # histories per test


@pytest.mark.parametrize("first", range(0, 8 * BLOCK, BLOCK))
def test_every_history_keeps_the_invariants_and_comes_to_its_end(first: int) -> None:
    for seed in range(first, first + BLOCK):
        World(seed).play()


@pytest.mark.parametrize("first", range(0, 4 * BLOCK, BLOCK))
def test_every_history_of_agents_that_lag_keeps_the_invariants_and_comes_to_its_end(first: int) -> None:
    overlapped = 0
    for seed in range(first, first + BLOCK):
        world = World(seed, lagging=True)
        world.play(40 if seed % 2 else 250)
        overlapped += sum(host.overlapped for host in world.hosts.values() if isinstance(host, LaggingHost))
    assert overlapped > 10  # updates that ended while a later round was played


@pytest.mark.parametrize("seed", [3000706, 3000788])
def test_a_group_that_waits_gets_no_table(seed: int) -> None:
    """An old request for a turn came again while the group of its episode, whose host was lost, waited for another one (U4)."""
    World(seed).play()


def test_the_histories_meet_every_kind_of_fault_and_every_end() -> None:
    did: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(BLOCK):
        world = World(seed)
        world.play()
        did += world.did + world.core.counts
        ends.update("lost" if h.lost else "stopped" if h.stopped else "finished" for h in world.hosts.values())
    wanted = ("faulty Generate", "faulty Load", "faulty Work", "forged", "old message again", "duplicate at once")
    faults = ("fault: worker", "fault: server", "fault: freeze", "fault: host", "fault: join", "cut", "back")
    faults += tuple(f"fault: {name}" for name in FURTHER)
    counted = (
        "refused answers",
        "failed requests",
        "turns past their deadline",
        "repeated OpenTurn",
        "workers out of service",
        "dropped agents",
        "dropped episodes",
        "late results",
        "refused Operate",
        "group dealt to a further host",
        "episodes dealt again",
        "late episodes",
    )
    assert [name for name in (*wanted, *faults, *counted) if not did[name]] == []
    assert min(ends["lost"], ends["stopped"], ends["finished"]) > 0


def test_the_same_history_gives_the_same_states_and_messages_whatever_the_hash_seed() -> None:
    digests = []
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        command = [sys.executable, str(HERE / "core_world.py"), *map(str, range(12))]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        digests.append(ran.stdout)
    assert digests[0] == digests[1]
    assert len(set(digests[0].split())) == 12
