"""`timeline.jsonl`: when the run played, and when each agent waited, computed its gradient, stepped and published.

A line is a span: `round`, `agent` ("" for the play of a whole phase), `what`, `begin` and `end` in seconds since this process began the
run. `what` is a phase (`rollout`, `evaluate`), a part of an update (`gradient`, `optimizer`, `publish`), or `wait/<barrier>`. With
`max_lag`, `round` is the newest round that had begun. It is only for looking at: it is not synced, and lines that are torn are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.app.progress import ARRIVED, RunFacts, Silent
from coordinator.app.rundir import blamed, write_file
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase

FILE = "timeline.jsonl"
WAIT = "wait/"


@dataclass(frozen=True, slots=True)
class Span:
    """One line."""

    round: int
    agent: str
    what: str
    begin: float
    end: float


class Timeline(Silent):
    """A watcher that gathers spans; `flush` writes those that are over."""

    def __init__(self, directory: Path, now: Callable[[], float]) -> None:
        self._path, self._now, self._zero = directory / FILE, now, now()
        self._agents: frozenset[str] = frozenset()
        self._round = 0
        self._open: dict[str, tuple[str, float]] = {}  # what is under way, by agent ("": the play of a phase)
        self._over: list[Span] = []

    def started(self, facts: RunFacts) -> None:
        self._agents = frozenset(each.name for each in facts.agents)
        self._zero = self._now()

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None:
        at = self._now()
        self._round = round
        self._over += [
            Span(round, each.member, f"{WAIT}{phase}_{edge}", at - each.seconds, at)
            for each in waits
            if each.member in self._agents and each.seconds > 0
        ]
        if phase != Phase.UPDATE:
            self._turn_to("", str(phase) if edge == Edge.START else "", at)

    def updating(self, agent: str, what: str) -> None:
        self._turn_to(agent, "" if what == ARRIVED else what, self._now())

    def flush(self) -> None:
        """Append what is over. RunDirectoryError if it cannot be written."""
        spans, self._over = self._over, []
        lines = [json.dumps(self._relative(span)) + "\n" for span in spans]
        with blamed(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _turn_to(self, agent: str, what: str, at: float) -> None:
        """What the agent did is over; now it does this ("": nothing)."""
        before, began = self._open.pop(agent, ("", at))
        if before:
            self._over.append(Span(self._round, agent, before, began, at))
        if what:
            self._open[agent] = what, at

    def _relative(self, span: Span) -> dict[str, object]:
        return asdict(span) | {"begin": round(span.begin - self._zero, 6), "end": round(span.end - self._zero, 6)}


def read_timeline(run: Path) -> list[Span]:
    """The spans of a run directory, as they were written; none if there is no such file. RunDirectoryError if it cannot be read."""
    path = run / FILE
    with blamed(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [span for line in lines if (span := _span(line)) is not None]


def rewind_timeline(run: Path, newest: int) -> None:
    """Remove the spans of later rounds. RunDirectoryError if that cannot be done."""
    spans = [span for span in read_timeline(run) if span.round <= newest]
    if (run / FILE).exists():
        write_file(run / FILE, _text(spans).encode())


def _text(spans: Iterable[Span]) -> str:
    return "".join(json.dumps(asdict(span)) + "\n" for span in spans)


def _span(line: str) -> Span | None:
    try:
        found = json.loads(line)
        return Span(
            int(found["round"]), str(found["agent"]), str(found["what"]), float(found["begin"]), float(found["end"])
        )
    except (ValueError, TypeError, KeyError):
        return None
