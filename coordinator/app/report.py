"""`report.html`: a run as one page for people, made of what its directory holds; so it can be made of an old run, and of one that goes on.

Self-contained: no scripts, nothing is fetched. What comes from the run is escaped, by the template and by matplotlib.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from coordinator.app import findings
from coordinator.app.figures import NOTHING, clock, plain, readable, signed, took
from coordinator.app.lanes import draw_lanes, spans_of_a_round, waits
from coordinator.app.progress import Row
from coordinator.app.recorded import newest_recordings
from coordinator.app.report_charts import charts
from coordinator.app.rundir import RunDirectoryError, blamed, read_metrics
from coordinator.app.timeline import read_timeline
from scenarios import render
from tinker.protocol.episodes import Recording
from tinker.protocol.values import Ended, Phase

FILE = "report.html"
SCRIPTED = "ScriptedPlayer"  # the player of a seat that no model plays
ENOUGH = 4  # episodes, to say that a seat always forfeits
REASONS = 12  # of forfeits and retries that are shown
LINES = 80  # of a transcript

Table = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Played:
    """One agent: its seats, and what is trained of it."""

    name: str
    seats: str
    trained: str


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode in words."""

    title: str
    text: str


def page(run: Path) -> str:
    """The HTML. RunDirectoryError if this is no run directory, or something in it cannot be read."""
    config, exit = _config(run), _exit(run)
    rows, timeline = read_metrics(run), read_timeline(run)
    rollout, evaluation = newest_recordings(run, Phase.ROLLOUT), newest_recordings(run, Phase.EVALUATE)
    headline = next((str(row["measure"]) for row in rows if row.get("measure")), "")
    round, spans = spans_of_a_round(rows, timeline)
    trained = findings.trained(rows)
    done = max(map(findings.round_of, trained), default=0)
    return _template().render(
        scenario=str(config.get("scenario", run.name)),
        run=run.resolve().name,
        state=_state(exit),
        detail=readable(str(exit.get("detail", ""))) if exit else "",
        facts=_facts(config, rollout, done),
        agents=_agents(config, rows, rollout),
        others=_others(evaluation),
        warnings=[*findings.warnings(rows, _whole(config, "groups")), *seat_warnings(rollout)],
        changes=_changes(rows, headline),
        charts=[(title, Markup(svg)) for title, svg in charts(rows, headline)],
        lanes=Markup(draw_lanes(round, spans)),
        lanes_round=round,
        measured=bool(timeline),
        waits=[(agent, place.replace("_", " "), took(seconds)) for agent, place, seconds in waits(spans)],
        time=list(_time(rows)),
        counts=_counts(trained),
        reasons=reasons(rollout),
        last=rollout[0].episode.round if rollout else 0,
        samples=samples(rollout),
    )


@cache
def _template() -> jinja2.Template:
    text = files("coordinator.app").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _config(run: Path) -> Mapping[str, Any]:
    path = run / "config.toml"
    if not path.is_file() or not (run / "metrics.jsonl").is_file():
        raise RunDirectoryError(f"{run} is no run directory (config.toml and metrics.jsonl are not both there)")
    try:
        with blamed(path):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error


def _exit(run: Path) -> Mapping[str, Any] | None:
    path = run / "exit.json"
    try:
        with blamed(path):
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    return found if isinstance(found, dict) else None


def _state(exit: Mapping[str, Any] | None) -> str:
    if exit is None:
        return "not over: it goes on, or was killed"
    return f"{exit.get('reason', 'over')} (exit code {exit.get('code', '?')})"


def _facts(config: Mapping[str, Any], rollout: Sequence[Recording], done: int) -> list[tuple[str, str]]:
    learning = config.get("learning", {})
    episodes = _whole(config, "groups") * _whole(config, "group_size")
    facts = [
        ("model", f"{config.get('model', '?')} ({config.get('engine', '?')} engine); its own weights are not trained"),
        ("seed", str(config.get("seed", "?"))),
        ("rounds", f"{done} of {config.get('rounds', '?')} done, {episodes} episodes each"),
        ("temperature", str(learning.get("temperature", "?"))),
    ]
    if rollout:
        facts.insert(0, ("version of the scenario", str(rollout[0].version)))
        facts.append(("parameters", rollout[0].params))
    return facts


def _agents(config: Mapping[str, Any], rows: Sequence[Row], rollout: Sequence[Recording]) -> list[Played]:
    """Who plays where; a seat that no agent names has an agent of its own name."""
    named: Mapping[str, Any] = config.get("agents", {})
    seats = {str(agent): list(own.get("seats", [agent])) for agent, own in named.items()}
    taken = {seat for own in seats.values() for seat in own}
    at_table = [str(seat) for seat, _ in rollout[0].players] if rollout else list(findings.agents(rows))
    seats |= {seat: [seat] for seat in at_table if seat not in taken and seat not in seats}
    return [
        Played(
            agent, ", ".join(own), _trained({**config.get("learning", {}), **named.get(agent, {}).get("learning", {})})
        )
        for agent, own in seats.items()
    ]


def _trained(learning: Mapping[str, Any]) -> str:
    if learning.get("every", 1) == 0:
        return "nothing: it is frozen"
    words = f"LoRA adapter of rank {learning.get('rank', '?')} by {learning.get('algorithm', '?')}, lr {learning.get('lr', '?')}"
    every = int(learning.get("every", 1))
    return words if every == 1 else f"{words}, every {every} rounds"


def _others(evaluation: Sequence[Recording]) -> list[tuple[str, str]]:
    """Seats that are scripted in an evaluation: the seat, and where."""
    found = dict.fromkeys(
        (str(seat), each.evaluation.rpartition("/")[0])
        for each in evaluation
        for seat, player in each.players
        if player == SCRIPTED and each.evaluation
    )
    return list(found)


def seat_warnings(recordings: Sequence[Recording]) -> Iterator[str]:
    """A seat that forfeits in every one of these episodes."""
    for seat in [seat for seat, _ in recordings[0].players] if len(recordings) >= ENOUGH else []:
        if all(any(line.kind == "forfeit" and line.seat == seat for line in each.lines) for each in recordings):
            round = recordings[0].episode.round
            yield f"seat {seat} forfeits in every episode of round {round}; its answers do not parse, or it does not answer"


def _changes(rows: Sequence[Row], headline: str) -> Table:
    return [
        (
            each.what,
            plain(each.before),
            plain(each.after),
            signed(None if each.before is None or each.after is None else each.after - each.before),
            f"{each.rounds_before} → {each.rounds_after}",
        )
        for each in findings.changes(rows, headline)
    ]


def _time(rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Seconds of the rounds by phase, and of the same by who worked."""
    spent = findings.seconds(rows)
    whole = spent.get("round") or sum(spent.get(phase, 0.0) for phase in findings.PHASES)
    parts = {phase: spent[phase] for phase in findings.PHASES if phase in spent} | findings.work(spent)
    for part, seconds in parts.items():
        share = f"{seconds / whole:.0%}" if whole and part != "evaluate" else NOTHING
        yield part, clock(seconds) if seconds >= 100 else took(seconds), share


def _counts(trained: Sequence[Row]) -> list[tuple[str, str, str]]:
    """What was counted, for whom, and how often."""
    return [
        (findings.COUNTED.get(key, key.removeprefix("count/").replace("_", " ")), agent, f"{times:,}")
        for key, by_agent in findings.counts(trained).items()
        for agent, times in by_agent.items()
        if times
    ]


def reasons(recordings: Sequence[Recording]) -> list[tuple[str, str, str, str]]:
    """Why seats forfeited, and what they said that did not parse: seat, kind, reason or words, times; the most frequent first."""
    kinds = {"forfeit": "forfeited", "complaint": "had to try again after"}
    found = Counter(
        (str(line.seat), kinds[line.kind], f"cut off by the {line.cut} limit" if line.cut else readable(line.text))
        for each in recordings
        for line in each.lines
        if line.kind in kinds
    )
    return [(*key, str(times)) for key, times in found.most_common(REASONS)]


def samples(recordings: Sequence[Recording]) -> list[Sample]:
    """The episodes with the best and the worst scores, and one of the others; a choice that does not change when asked again."""
    played = [each for each in recordings if each.ended != Ended.FAILED] or list(recordings)
    ranked = sorted(played, key=lambda each: (sum(score for _, score in each.scores), str(each.episode)))
    if not ranked:
        return []
    chosen = {"Best": ranked[-1], "Worst": ranked[0]} if len(ranked) > 1 else {"The only one": ranked[0]}
    if rest := ranked[1:-1]:
        chosen["Random"] = random.Random(len(ranked) * 1_000_003 + rest[0].episode.round).choice(rest)
    return [Sample(f"{title}: {each.episode}", _words(each)) for title, each in chosen.items()]


def _words(recording: Recording) -> str:
    lines = readable(render(recording)).splitlines()
    more = [f"… {len(lines) - LINES} more lines in the recording"] if len(lines) > LINES else []
    return "\n".join(lines[:LINES] + more)


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key, 0)
    return value if isinstance(value, int) else 0
