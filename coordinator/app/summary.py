"""`summary.md`: one page about a run, for whoever finds the directory later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from coordinator.app import findings
from coordinator.app.figures import NOTHING, clock, plain, readable, signed, took
from coordinator.app.progress import Row, RunFacts, RunResult

TRANSCRIPT_LINES = 60


def summary(facts: RunFacts, rows: Sequence[Row], result: RunResult, *, curves: str = "") -> str:
    """The page as Markdown. `curves`: the picture's file name, relative to the page ("": none). Paths are shown as they are given."""
    sections = (
        _head(facts, result),
        _warnings(result),
        _changes(result),
        [f"![Reward, headline measure and evaluations by round]({curves})"] if curves else [],
        _time(rows),
        _waits(rows),
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


def _time(rows: Sequence[Row]) -> Iterator[str]:
    """Seconds per phase and what they were spent on; shares are of all phases together."""
    spent = findings.seconds(rows)
    whole = sum(spent.get(phase, 0.0) for phase in findings.PHASES)
    if not whole:
        return
    yield "## Time"
    yield ""
    rounds = max(1, len({findings.round_of(row) for row in findings.trained(rows)}))
    parts = [each for each in findings.PHASES if each in spent] + [
        each for each in spent if each not in findings.PHASES
    ]
    yield from _table(
        ("", "in all", "per training round", "share"),
        (
            (
                part if part in findings.PHASES else f"of it {part}",
                took(spent[part]),
                took(spent[part] / rounds),
                f"{spent[part] / whole:.1%}",
            )
            for part in parts
        ),
    )
    if (rate := findings.mean(findings.trained(rows), "tokens_per_second")) is not None:
        yield ""
        yield f"{rate:,.0f} tokens per second on average."


def _waits(rows: Sequence[Row]) -> Iterator[str]:
    """How long each agent waited at each barrier."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("wait/"))
    agents = findings.agents(rows)
    if not keys or not any(findings.total(rows, key) for key in keys):
        return
    yield "## Waiting at barriers (seconds per round)"
    yield ""
    yield from _table(
        ("barrier", *agents),
        (
            (
                key.removeprefix("wait/").replace("_", " "),
                *(plain(findings.mean((row for row in rows if row.get("agent") == agent), key)) for agent in agents),
            )
            for key in keys
        ),
    )


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    yield "## What was dropped, masked, refused or failed"
    yield ""
    counts = findings.counts(rows)
    if not counts:
        yield "Nothing."
        return
    agents = tuple(dict.fromkeys(agent for times in counts.values() for agent in times))
    yield from _table(
        ("", *agents),
        (
            (reason, *(str(times[agent]) if agent in times else NOTHING for agent in agents))
            for reason, times in counts.items()
        ),
    )


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
