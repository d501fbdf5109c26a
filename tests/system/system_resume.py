"""Runs that are killed or stopped at some moment, gone on with, and compared with one that nothing has disturbed.

`python tests/system/system_resume.py COUNT PLACE` kills deterministic runs of the torch engine at COUNT random moments, one each.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from system_processes import Machine, machine, wait_until

TORCH = ("--deterministic", "--set", "learning.max_tokens=4", "--set", "learning.algorithm='reinforce'")
SMALL = ("--rounds", "3", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")
WARMING = ("--set", "learning.warmup=4", "--set", "learning.epochs=2")
TIMES = re.compile(r"seconds/|wait/|tokens_per_second|coordinator_cpu|engine_seconds")


def left(run: Path) -> dict[str, Any]:
    """Everything that a run leaves and that does not depend on when and where it was played."""
    found: dict[str, Any] = {}
    for path in sorted((run / "adapters").rglob("*.safetensors")):
        found[str(path.relative_to(run))] = path.read_bytes()
    for path in sorted((run / "recordings").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name] = [{key: value for key, value in line.items() if key != "run"} for line in lines]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{key: value for key, value in row.items() if not TIMES.match(key)} for row in rows]
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def happenings(run: Path) -> int:
    """How far a run has come: lines in the log of its coordinator."""
    log = run / "logs/coordinator.log"
    return log.read_text().count("\n") if log.exists() else 0


def play(here: Machine, run: str, *arguments: str) -> None:
    """A run from begin to end."""
    program = here.start("run", "dilemma", *SMALL, *WARMING, *arguments, "--out", run)
    assert program.wait(120.0) == 0, program.story()


def interrupted(here: Machine, run: str, at: int, *arguments: str, number: int = signal.SIGKILL) -> None:
    """A run whose processes are all killed (or that is told to stop) once this much has happened."""
    program = here.start("run", "dilemma", *SMALL, *WARMING, *arguments, "--out", run)
    wait_until(lambda: happenings(here.place / run) >= at or program.over, program.story, 120.0)
    if number == signal.SIGKILL:
        everybody: list[psutil.Process] = [*program.children()]
        program.signal(number)
        for child in everybody:
            child.kill()
    else:
        program.signal(number)
    program.wait(120.0)


def go_on(here: Machine, run: str) -> None:
    """Play the rest; a run that had ended meanwhile is left alone."""
    ended = here.place / run / "exit.json"
    if ended.exists() and json.loads(ended.read_text())["reason"] == "finished":
        return
    program = here.start("run", "--resume", run)
    assert program.wait(120.0) == 0, program.story()


def main(count: int, place: Path) -> int:
    wrong = 0
    with machine(place) as here:
        play(here, "whole", *TORCH)
        expected, total = left(place / "whole"), happenings(place / "whole")
        for seed in range(count):
            at = random.Random(seed).randint(1, total)
            interrupted(here, f"run{seed}", at, *TORCH)
            complete = len(here.rows(f"run{seed}"))
            go_on(here, f"run{seed}")
            found = differences(expected, left(place / f"run{seed}"))
            wrong += bool(found)
            print(
                f"seed {seed}: killed at {at} of {total}, {complete} rows: {'differs in ' + ', '.join(found) if found else 'equal'}",
                flush=True,
            )
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
