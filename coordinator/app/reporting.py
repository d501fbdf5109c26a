"""A watcher that keeps `timeline.jsonl` and `report.html` while the run goes on and when it is over.

It never costs more than a fiftieth of the run's time: the longer a page takes to make, the later the next one is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.app import findings
from coordinator.app.progress import Progress, Row, RunFacts, RunResult, Silent
from coordinator.app.report import FILE, page
from coordinator.app.rundir import RunDirectoryError, write_file
from coordinator.app.timeline import Timeline
from scenarios import RecordingError
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase

SHARE = 50  # between two pages goes so many times what a page takes
EVERY = 3  # rounds between two pages, at least
FIRST = 30.0  # seconds after the start before the first one: whoever looks at a short run looks at its end


class Reporting(Silent):
    """Of the run in this directory. What cannot be written is told to `user`, once, and never stops the run."""

    def __init__(self, directory: Path, user: Progress, now: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._user, self._now = directory, user, now
        self._timeline = Timeline(directory, now)
        self._due, self._rounds, self._told = 0.0, 0, False

    def started(self, facts: RunFacts) -> None:
        self._timeline.started(facts)
        self._due = self._now() + FIRST

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None:
        self._timeline.opened(round, phase, edge, waits)

    def updating(self, agent: str, what: str) -> None:
        self._timeline.updating(agent, what)

    def rows(self, rows: Sequence[Row]) -> None:
        self._keep(self._timeline.flush)
        if findings.trained(rows):
            self._rounds += 1
            if self._rounds >= EVERY and self._now() >= self._due:
                self._keep(self._write)

    def finished(self, result: RunResult) -> None:
        self._keep(self._timeline.flush)
        self._keep(self._write)

    def _write(self) -> None:
        began = self._now()
        write_file(self._directory / FILE, page(self._directory).encode())
        ended = self._now()
        self._rounds, self._due = 0, ended + SHARE * (ended - began)

    def _keep(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (RunDirectoryError, RecordingError) as error:
            if not self._told:
                self._user.note(f"{FILE} is not complete: {error}")
            self._told = True
