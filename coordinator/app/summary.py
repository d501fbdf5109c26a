"""`summary.md`: one page about a run, for whoever finds the directory later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from coordinator.app import findings
from coordinator.app.figures import NOTHING, clock, plain, readable, signed
from coordinator.app.lag_report import Overlap, overlaps
from coordinator.app.progress import Row, RunFacts, RunResult

TRANSCRIPT_LINES = 60


def summary(facts: RunFacts, rows: Sequence[Row], result: RunResult, *, curves: str = "") -> str:
    """The page as Markdown. `curves`: the picture's file name, relative to the page ("": none). Paths are shown as they are given."""
    sections = (
        _head(facts, result),
        _warnings(result),
        _changes(result),
        [f"![Reward, headline measure and evaluations by round]({curves})"] if curves else [],
        _time(rows, result.seconds),
        _waits(rows),
        _overlaps(rows),
        _counts(rows),
        _episodes(result),
        _files(result),
    )
    return "\n".join(line for section in sections if (lines := list(section)) for line in (*lines, ""))


def _head(facts: RunFacts, result: RunResult) -> Iterator[str]:
    yield f"# {_cell(facts.scenario)}"
    yield ""
    if facts.about:
        yield _cell(facts.about)
        yield ""
    ending = f"**{_cell(result.exit.reason)}** (exit code {result.exit.code}) after {clock(result.seconds)}"
    yield ending + (f": {_cell(result.exit.detail)}" if result.exit.detail else "")
    yield ""
    if facts.command:
        yield f"    {readable(facts.command)}"
        yield ""
    yield f"Model `{facts.model}`, seed {facts.seed}, {facts.rounds} rounds of {facts.episodes} episodes."
    yield ""
    yield from _table(
        ("agent", "seats", "policy", "trained by"),
        ((each.name, ", ".join(each.seats), each.policy, each.trains) for each in facts.agents),
    )


def _warnings(result: RunResult) -> Iterator[str]:
    if result.warnings:
        yield "## Warnings"
        yield ""
        yield from (f"- {_cell(each)}" for each in result.warnings)


def _changes(result: RunResult) -> Iterator[str]:
    yield "## Before and after"
    yield ""
    if not result.changes:
        yield "No round was finished, so there is nothing to compare."
        return
    yield from _table(
        ("", "before", "after", "change", "rounds"),
        (
            (
                each.what,
                plain(each.before),
                plain(each.after),
                signed(None if each.before is None or each.after is None else each.after - each.before),
                f"{each.rounds_before} → {each.rounds_after}" if each.rounds_before else "",
            )
            for each in result.changes
        ),
    )


def _time(rows: Sequence[Row], whole: float) -> Iterator[str]:
    """Twice the same time: the training rounds by who worked, and the whole run by phase. Each time the parts add up."""
    spent = findings.seconds(rows)
    if not any(spent.get(phase) for phase in findings.PHASES):
        return
    yield "## Time"
    yield ""
    rounds = max(1, len({findings.round_of(row) for row in findings.trained(rows)}))
    yield from _table(
        ("", "seconds", "per training round", "share"),
        [
            *_parts("all training rounds", findings.work(spent), rounds),
            *_parts("the whole run", findings.phases(spent, whole), rounds),
        ],
    )
    if (rate := findings.mean(findings.trained(rows), "tokens_per_second")) is not None:
        yield ""
        yield f"{rate:,.0f} tokens per second of rollout on average."


def _parts(name: str, parts: Mapping[str, float], rounds: int) -> Iterator[tuple[str, ...]]:
    """Rows of a table: the sum of the parts, then each of them. Only what every round has is given per round."""
    whole = sum(parts.values())
    if not whole:
        return
    rarely = ("the whole run", "evaluate", "everything else")
    each = NOTHING if name in rarely else f"**{whole / rounds:,.2f}**"
    yield f"**{name}**", f"**{whole:,.2f}**", each, "**100.0%**"
    for part, seconds in parts.items():
        each = NOTHING if part in rarely else f"{seconds / rounds:,.2f}"
        yield part, f"{seconds:,.2f}", each, f"{seconds / whole:.1%}"


def _waits(rows: Sequence[Row]) -> Iterator[str]:
    """How long each agent waited at each barrier, on average."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("wait/"))
    agents = findings.agents(rows)
    if not keys or not any(findings.total(rows, key) for key in keys):
        return
    yield "## Waiting at barriers (milliseconds per round)"
    yield ""
    yield from _table(
        ("barrier", *agents),
        (
            (
                key.removeprefix("wait/").replace("_", " "),
                *(_milliseconds(findings.mean(findings.trained(rows, agent), key)) for agent in agents),
            )
            for key in keys
        ),
    )


def _overlaps(rows: Sequence[Row]) -> Iterator[str]:
    """What overlapping gained, and what it cost."""
    found = overlaps(rows)
    if not found:
        return
    yield "## Rollouts beside updates"
    yield ""
    lines: dict[str, Callable[[Overlap], str]] = {
        "wall time waited at barriers": lambda each: _share(each.waited),
        "update time beside rollouts": lambda each: f"{_share(each.overlapped)} of {each.update_seconds:,.2f} s",
        "age of trained tokens in updates: mean": lambda each: plain(each.lag_mean),
        "age of trained tokens in updates: largest": lambda each: f"{each.lag_max}",
        "ratios clipped": lambda each: _share(each.clipped),
        "ratios cut off at the cap": lambda each: _share(each.truncated),
        "sequences refused as too old (tokens)": lambda each: f"{each.refused[0]:,} ({each.refused[1]:,})",
    }
    yield from _table(
        ("", *(each.agent for each in found)), ((what, *map(read, found)) for what, read in lines.items())
    )


def _share(part: float | None) -> str:
    return NOTHING if part is None else f"{part:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1000 * seconds:,.1f}"


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    yield "## What was dropped, masked, refused or failed"
    yield ""
    evaluated = [row for row in rows if findings.evaluated(row)]
    tables = {"In training": findings.counts(findings.trained(rows)), "In evaluations": findings.counts(evaluated)}
    if not any(tables.values()):
        yield "Nothing."
    for number, (where, counts) in enumerate((where, counts) for where, counts in tables.items() if counts):
        yield from ([""] if number else [])
        yield f"{where}:"
        yield ""
        agents = tuple(dict.fromkeys(agent for times in counts.values() for agent in times))
        yield from _table(
            ("", "what it counts", *agents),
            (
                (_reason(key), findings.COUNTED.get(key, ""), *(_times(times.get(agent)) for agent in agents))
                for key, times in counts.items()
            ),
        )


def _reason(key: str) -> str:
    """The key as words. Some have a twin: `cut` counts incidents, `count/cut` sequences that were left out for it."""
    words = key.removeprefix("count/").replace("_", " ")
    return f"left out: {words}" if key in findings.LEFT_OUT else words


def _times(count: int | None) -> str:
    return NOTHING if count is None else f"{count:,}"


def _episodes(result: RunResult) -> Iterator[str]:
    for number, transcript in enumerate(result.transcripts, start=1):
        yield f"## Sample episode {number}"
        yield ""
        lines = readable(transcript).rstrip().splitlines()
        yield from (f"    {line}" for line in lines[:TRANSCRIPT_LINES])
        if len(lines) > TRANSCRIPT_LINES:
            yield f"    … {len(lines) - TRANSCRIPT_LINES} more lines in the recording"
        if number < len(result.transcripts):
            yield ""


def _files(result: RunResult) -> Iterator[str]:
    if result.files:
        yield "## Where it lies"
        yield ""
        yield from _table(("what", "where"), ((what, f"`{path}`") for what, path in result.files))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(map(_cell, head)) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(map(_cell, row)) + " |"


def _cell(text: str) -> str:
    """One line of Markdown: a line break or a bar would end the cell."""
    return " ".join(readable(text).split()).replace("|", "\\|")
