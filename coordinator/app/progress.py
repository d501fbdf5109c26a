"""What the run loop tells whoever watches: one `Progress` protocol, and the watchers that show nothing or pass it on.

Every call is synchronous, cheap and never raises; the run loop calls from one thread. Calls come in the order of the run:
`started`, then per round `opened`, `missing`, `playing`, `updating`, `rows`, with a `note` anywhere, and `finished` once at the end
(not if the run crashes; a watcher that holds a terminal is closed by whoever opened it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.app.rundir import Exit
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase

Row = Mapping[str, object]

ARRIVED = "done"  # what an agent is busy with when its update is over and it waits for the others


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """One agent: its seats, its policy, and what is trained (the algorithm's name, or "frozen")."""

    name: str
    seats: tuple[str, ...]
    policy: str
    trains: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known before the first round. `about`: the first line of the scenario's docstring; `episodes`: per round;
    `headline`: the measure that says how well it goes ("": none); `command`: the command line that started the run; `groups`: per
    round (0: not known)."""

    scenario: str
    about: str
    agents: tuple[AgentFacts, ...]
    model: str
    rounds: int
    episodes: int
    out: Path
    seed: int
    headline: str = ""
    command: str = ""
    groups: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the table before/after: a number, and the rounds it was taken from. None: there was no number."""

    what: str
    before: float | None
    after: float | None
    rounds_before: str = ""
    rounds_after: str = ""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How it ended: `changes` and `warnings` (both made by `coordinator.app.findings`), sample episodes in words, and where everything
    lies (what, path)."""

    exit: Exit
    changes: tuple[Change, ...]
    transcripts: tuple[str, ...]
    files: tuple[tuple[str, Path], ...]
    seconds: float
    warnings: tuple[str, ...] = ()


class Progress(Protocol):
    """A watcher of one run. See the module for order and guarantees."""

    def started(self, facts: RunFacts) -> None:
        """The run was admitted; nothing has been played."""

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None:
        """A global barrier opened, after these waits."""

    def missing(self, round: int, phase: Phase, edge: Edge, arrived: tuple[str, ...], missing: tuple[str, ...]) -> None:
        """A global barrier is still shut."""

    def playing(self, done: int, total: int) -> None:
        """So many of this phase's episodes are accounted for."""

    def updating(self, agent: str, what: str) -> None:
        """An agent is busy with its update: `what` in a word or two (gradient, optimizer, publish), and
        `ARRIVED` when it is through."""

    def rows(self, rows: Sequence[Row]) -> None:
        """The metrics rows of a finished round or evaluation, one per agent."""

    def note(self, text: str) -> None:
        """Something the user should read, in one line."""

    def finished(self, result: RunResult) -> None:
        """The run is over."""


class Silent:
    """Shows nothing."""

    def started(self, facts: RunFacts) -> None: ...

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None: ...

    def missing(
        self, round: int, phase: Phase, edge: Edge, arrived: tuple[str, ...], missing: tuple[str, ...]
    ) -> None: ...

    def playing(self, done: int, total: int) -> None: ...

    def updating(self, agent: str, what: str) -> None: ...

    def rows(self, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None: ...

    def finished(self, result: RunResult) -> None: ...


class Both:
    """Passes every call on, in the order of its watchers."""

    def __init__(self, *watchers: Progress) -> None:
        self._watchers = watchers

    def started(self, facts: RunFacts) -> None:
        for each in self._watchers:
            each.started(facts)

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None:
        for each in self._watchers:
            each.opened(round, phase, edge, waits)

    def missing(self, round: int, phase: Phase, edge: Edge, arrived: tuple[str, ...], missing: tuple[str, ...]) -> None:
        for each in self._watchers:
            each.missing(round, phase, edge, arrived, missing)

    def playing(self, done: int, total: int) -> None:
        for each in self._watchers:
            each.playing(done, total)

    def updating(self, agent: str, what: str) -> None:
        for each in self._watchers:
            each.updating(agent, what)

    def rows(self, rows: Sequence[Row]) -> None:
        for each in self._watchers:
            each.rows(rows)

    def note(self, text: str) -> None:
        for each in self._watchers:
            each.note(text)

    def finished(self, result: RunResult) -> None:
        for each in self._watchers:
            each.finished(result)
