"""The run on a terminal: a live view where there is one, else one line per round; both end with the same report."""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.app import findings, screen
from coordinator.app.figures import clock, plain, readable, signed
from coordinator.app.progress import Progress, Row, RunFacts, RunResult
from coordinator.app.screen import Picture, Shut
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase

TRANSCRIPT_LINES = 24
ENDING_LINES = 2  # how it ended and the scores: always shown
Now = Callable[[], float]


@contextmanager
def watching(
    console: Console | None = None, *, live: bool | None = None, now: Now = time.monotonic
) -> Iterator[Progress]:
    """A watcher for this terminal (default: standard output). The terminal is as before when the block ends, however it ends.

    `live` None: a live view if the console is a terminal that can move its cursor, else lines.
    """
    with _lenient(sys.stdout):
        console = console or Console(highlight=False)
        if live is None:
            live = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
        if not live:
            yield Lines(console, now)
            return
        watcher = LiveView(console, now)
        try:
            yield watcher
        finally:
            watcher.close()


class Lines:
    """One line per round, evaluation, note and shut barrier; for pipes and log files. A closed pipe ends the lines, not the run."""

    def __init__(self, console: Console, now: Now = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._picture = Picture()

    def started(self, facts: RunFacts) -> None:
        self._picture = Picture(facts=facts, began=self._now())
        self._say(f"{facts.scenario}: {facts.about}" if facts.about else facts.scenario)
        for agent in facts.agents:
            self._say(f"  {agent.name} (seats {', '.join(agent.seats)}; policy {agent.policy}): {agent.trains}")
        self._say(
            f"  model {facts.model}, seed {facts.seed}, {facts.rounds} rounds of {facts.episodes} episodes, in {facts.out}"
        )

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None: ...

    def missing(self, round: int, phase: Phase, edge: Edge, arrived: tuple[str, ...], missing: tuple[str, ...]) -> None:
        here = f" ({', '.join(arrived)} arrived)" if arrived else ""
        self._say(f"waiting at {screen.place(round, phase, edge)} for {', '.join(missing)}{here}")

    def playing(self, done: int, total: int) -> None: ...

    def updating(self, agent: str, what: str) -> None: ...

    def rows(self, rows: Sequence[Row]) -> None:
        self._picture = screen.noted(self._picture, rows)
        rounds = self._picture.facts.rounds if self._picture.facts else 0
        if trained := findings.trained(rows):
            self._say(self._round(trained, rounds))
        if evaluated := [row for row in rows if findings.evaluated(row)]:
            words = [f"{what} {plain(points[max(points)])}" for what, points in findings.evaluations(evaluated).items()]
            self._say(f"round {findings.round_of(evaluated[0])}/{rounds} evaluation | " + " | ".join(words))

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def finished(self, result: RunResult) -> None:
        _report(self._console, result)

    def _round(self, rows: Sequence[Row], rounds: int) -> str:
        """`round 12/60 rollout 1.1 s update 0.9 s | success 0.52 | hinter +0.41 v12 | 5,100 tok/s | left 1:32`, as far as it is known."""
        speed = screen.speed(rows)
        phases = [part for part in speed if part.startswith(("rollout", "update"))]
        parts = [" ".join([f"round {findings.round_of(rows[0])}/{rounds}", *phases])]
        headline = self._picture.facts.headline if self._picture.facts else ""
        measured = findings.mean(rows, f"measure/{headline}")
        parts += [f"{headline} {plain(measured)}"] if headline and measured is not None else []
        for row in rows:
            version = findings.number(row, "version")
            words = [str(row.get("agent", "")), signed(findings.number(row, "reward_mean"))]
            parts.append(" ".join(words + ([f"v{version:.0f}"] if version is not None else [])))
        parts += [part for part in speed if part not in phases]
        left = screen.time_left(self._picture, self._now())
        return " | ".join(parts + ([f"left {clock(left)}"] if left is not None else []))

    def _say(self, text: str) -> None:
        _print(self._console, Text(readable(text)), whole_lines=True)


class LiveView:
    """The view that redraws itself in place. Notes and whatever else is printed scroll above it."""

    def __init__(self, console: Console, now: Now = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._picture = Picture()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, vertical_overflow="crop")

    def started(self, facts: RunFacts) -> None:
        self._picture = Picture(facts=facts, began=self._now(), since=self._now())
        self._live.start()

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None:
        self._picture = screen.opened(self._picture, round, phase, edge, waits, self._now())

    def missing(self, round: int, phase: Phase, edge: Edge, arrived: tuple[str, ...], missing: tuple[str, ...]) -> None:
        self._picture = replace(self._picture, shut=Shut(screen.place(round, phase, edge), arrived, missing))

    def playing(self, done: int, total: int) -> None:
        self._picture = replace(self._picture, played=(done, total))

    def updating(self, agent: str, what: str) -> None:
        self._picture = replace(self._picture, busy={**self._picture.busy, agent: what})

    def rows(self, rows: Sequence[Row]) -> None:
        self._picture = screen.noted(self._picture, rows)

    def note(self, text: str) -> None:
        _print(self._console, Text(f"note: {readable(text)}", style="yellow"))

    def finished(self, result: RunResult) -> None:
        self._picture = replace(self._picture, ended=True)
        self.close()
        _report(self._console, result)

    def close(self) -> None:
        """Stop redrawing and give the cursor back; a second time does nothing."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        return screen.draw(self._picture, self._now(), self._console.width)


def _report(console: Console, result: RunResult) -> None:
    """How it ended: reason, before and after, warnings, sample episodes, and where everything lies."""
    good = result.exit.code == 0
    ending = f"{result.exit.reason} after {clock(result.seconds)}"
    cause, story = _told(readable(result.exit.detail))
    _print(console, Text(""))
    style = "bold green" if good else "bold red"
    _print(console, Text(f"{ending}: {cause}" if cause else ending, style=style), whole_lines=True)
    for line in story:
        _print(console, Text(f"  {line}", style="dim"), whole_lines=True)
    if result.changes:
        _print(console, Text(""))
        _print(console, _changes(result))
    for warning in result.warnings:
        _print(console, Text(f"warning: {readable(warning)}", style="yellow"))
    for number, transcript in enumerate(result.transcripts, start=1):
        _print(console, Text(f"\nSample episode {number}", style="bold"))
        lines = readable(transcript).rstrip().splitlines()
        rest = len(lines) - TRANSCRIPT_LINES
        first, last = lines[: TRANSCRIPT_LINES - ENDING_LINES], lines[-ENDING_LINES:]
        shown = lines if rest <= 1 else [*first, f"… {rest} more lines in the recording", *last]
        for line in shown:
            folded = textwrap.fill(
                line, console.width, initial_indent="  ", subsequent_indent="      ", drop_whitespace=False
            )
            _print(console, Text(folded), whole_lines=True)
    if result.files:
        _print(console, Text("\nWhere it lies", style="bold"))
        width = max(len(what) for what, _ in result.files)
        for what, path in result.files:
            _print(console, Text(f"  {what:<{width}}  {path}"), whole_lines=True)


def _told(detail: str) -> tuple[str, list[str]]:
    """Why it ended, in one line, and the other lines of the story. A traceback says at its end what went wrong."""
    lines = [line for line in detail.splitlines() if line.strip()]
    if not lines:
        return "", []
    if lines[0].startswith("Traceback "):
        return lines[-1], lines[:-1]
    return lines[0], lines[1:]


def _changes(result: RunResult) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rounds", no_wrap=True)
    for each in result.changes:
        both = each.before is not None and each.after is not None
        difference = each.after - each.before if each.before is not None and each.after is not None else None
        rounds = f"{each.rounds_before} → {each.rounds_after}" if both else ""
        table.add_row(each.what, plain(each.before), plain(each.after), signed(difference), Text(rounds, style="dim"))
    return table


def _print(console: Console, what: RenderableType, *, whole_lines: bool = False) -> None:
    """Print; rich answers a closed pipe by exiting, but a run goes on without a reader (the console is quiet from then on)."""
    try:
        console.print(what, soft_wrap=whole_lines, highlight=False, markup=False)
    except (SystemExit, OSError):
        console.quiet = True


@contextmanager
def _lenient(stream: object) -> Iterator[None]:
    """What this terminal's encoding cannot say is shown as `?` instead of ending the run."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)
