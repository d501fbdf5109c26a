"""Real processes through the real command line, and what they leave on the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds until a condition must hold, on a busy machine

LONG = ("--rounds", "100000", "--set", "evaluate_every=0", "--set", "groups=2", "--set", "group_size=2")
SCRIPTED = ("--engine", "scripted")


@dataclass(slots=True)
class Machine:
    """One place where processes run: `place` holds their runs, `temporary` is their TMPDIR. Whatever still runs at the end is ended."""

    place: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def temporary(self) -> Path:
        return self.place / "tmp"

    def start(self, *arguments: str, through: tuple[str, ...] = ()) -> Program:
        """`opentinker ARGUMENTS`, its output in files. `through`: a command that starts it."""
        return self.python("-W", "error", "-m", "coordinator.cli.main", *arguments, through=through)

    def python(self, *arguments: str, through: tuple[str, ...] = ()) -> Program:
        """This interpreter with our packages, its output in files."""
        number = len(self.started)
        out, err = self.place / f"out-{number}", self.place / f"err-{number}"
        self.temporary.mkdir(exist_ok=True)
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [*through, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=self.place,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": str(self.temporary),
                    "COLUMNS": "200",
                },
                text=True,
            )
        self.started.append(process)
        return Program(process, out, err)

    def run(self, *arguments: str) -> Program:
        """Start a long run of `guess` in `place/run` and wait until its first round is over."""
        program = self.start("run", "guess", *SCRIPTED, *LONG, "--out", "run", *arguments)
        wait_until(lambda: bool(self.rows()) or program.over, program.story)
        assert not program.over, program.story()
        return program

    def rows(self, run: str = "run") -> list[dict[str, Any]]:
        path = self.place / run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def exit(self, run: str = "run") -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.place / run / "exit.json").read_text())
        return told

    def assert_clean(self, program: Program) -> None:
        """No process that the program started is left, and nothing in the temporary directory."""
        wait_until(lambda: not program.children(), lambda: f"left behind: {program.children()}")
        wait_until(lambda: not any(self.temporary.iterdir()), lambda: f"left behind: {[*self.temporary.rglob('*')]}")


@dataclass(slots=True)
class Program:
    """A started command."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code, once it is over."""
        wait_until(lambda: self.over, self.story, seconds)
        return self.process.returncode

    def children(self) -> list[psutil.Process]:
        """Living processes that it started, also when it is gone itself."""
        return [each for each in psutil.process_iter() if self._is_child(each)]

    def child(self, name: str, but: Collection[int] = ()) -> psutil.Process:
        """The daemon of this name, when it is there; not one of these process ids."""
        found: list[psutil.Process] = []

        def there() -> bool:
            found[:] = [each for each in self.children() if name in each.cmdline() and each.pid not in but]
            return bool(found) or self.over

        wait_until(there, self.story)
        assert found, self.story()
        return found[0]

    def ready(self) -> str:
        """The address a daemon says on its first line."""
        wait_until(lambda: "\n" in self.out.read_text() or self.over, self.story)
        address: str = json.loads(self.out.read_text().splitlines()[0])["ready"]
        return address

    def story(self) -> str:
        return f"{self.process.args}\ncode {self.process.poll()}\n{self.out.read_text()}\n{self.err.read_text()}"

    def _is_child(self, each: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            command = each.cmdline()
            return "--parent" in command and command[command.index("--parent") + 1] == str(self.process.pid)
        return False


def wait_until(condition: Callable[[], bool], story: Callable[[], str], seconds: float = PATIENCE) -> None:
    """Look again and again, until the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.02)


@contextmanager
def machine(place: Path) -> Iterator[Machine]:
    made = Machine(place)
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
