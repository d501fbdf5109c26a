"""The whole system under a virtual clock: many histories, each with its own faults (`sim_world`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sim_faults import FAULTS
from sim_world import play

HERE = Path(__file__).parent
BLOCK = 250

SOMETIMES = (
    "barrier held for a loading version",
    "turn re-routed after a loss",
    "late answer fenced",
    "straggler notice",
    "seat forfeited by the gate",
    "core: refused answers",
    "core: connections closed",
    "WorkerLost heard",
    "LoadFailed heard",
    "GenerateFailed heard",
    "frames held by a cut",
    "refused by a full disk",
    "transfers to the dead",
    "core: turns past their deadline",
    "core: messages of lost workers",
    "core: late messages of ended runs",
    "coordinator restarted in rollout start",
    "coordinator restarted in rollout end",
    "coordinator restarted in update end",
    "coordinator restarted in evaluate end",
    "update ended beside a later rollout",
    "journal: tails lost with the machine",
    "refused by a full journal disk",
    "torn tail repaired",
    "agents left out",
    "episodes left out",
    "closed turn told again",
    "opening told again",
    "outcome of an operation told again",
    "answer of another version",
    "coordinator drained",
    "task server drained",
    "old coordinator spoke",
    "core: repeated Hello",
    "frames duplicated",
    "frames that overtook",
    "episodes delivered by a further host",
    "group dealt again after its host was lost",
    "core: late episodes",
    "further host died",
    "further host sleeps",
    "further host cut off",
    "further host deaf",
    "further host ended: finished",
    "further host ended: left",
    "run ended: finished",
    "run ended: stopped",
    "run ended: failed",
    "run ended: killed",
    *(f"fault: {name}" for name in FAULTS),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, 2 * BLOCK, BLOCK))
def test_every_history_keeps_the_invariants_and_rare_states_are_reached(first: int) -> None:
    did: Counter[str] = Counter()
    for seed in range(first, first + BLOCK):
        did += play(seed).did
    assert [name for name in SOMETIMES if not did[name]] == []


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    traces = []
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, str(HERE / "run.py"), "12", "--digests"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert ran.returncode == 0, ran.stdout
        traces.append(ran.stdout)
    assert traces[0] == traces[1]
    assert len({line.split()[1] for line in traces[0].splitlines()}) == 12
