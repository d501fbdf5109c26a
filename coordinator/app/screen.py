"""What the live view shows: a frozen picture of the run, moved on by every call of the run loop and drawn from any thread.

`draw` reads nothing but its arguments, so that the thread that refreshes the terminal never meets a picture in the making.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.app import findings
from coordinator.app.figures import clock, plain, readable, signed, span, sparkline, took
from coordinator.app.progress import ARRIVED, Row, RunFacts
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase

SHOWN_AGENTS = 6
EVALUATION_LINES = 2
LEAST_SPAN = 0.5  # of rewards: smaller ups and downs do not fill the height of a sparkline
OTHER_COLUMNS = 11 + 6 + 7 + 9 + 6 * 2  # how wide the table is besides agent, sparkline and headline
SHORT_WAIT = 0.05  # seconds: below this nobody waited
WORDS = {Phase.ROLLOUT: "rollout", Phase.UPDATE: "update", Phase.EVALUATE: "evaluation"}


@dataclass(frozen=True, slots=True)
class Shut:
    """A barrier that is still shut, as last reported."""

    where: str
    arrived: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongWait:
    """The longest wait of a round."""

    where: str
    wait: Wait


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything the view needs. `done`: training rounds whose rows are in; `longest`: of the round before, `gathering` of this one."""

    facts: RunFacts | None = None
    began: float = 0.0
    round: int = 0
    phase: Phase | None = None
    since: float = 0.0
    done: int = 0
    played: tuple[int, int] = (0, 0)
    busy: Mapping[str, str] = field(default_factory=dict)
    shut: Shut | None = None
    longest: LongWait | None = None
    gathering: LongWait | None = None
    latest: Mapping[str, Row] = field(default_factory=dict)
    rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: tuple[Row, ...] = ()
    ended: bool = False


def place(round: int, phase: Phase, edge: Edge) -> str:
    return f"{WORDS[phase]} {edge.value} of round {round}"


def opened(picture: Picture, round: int, phase: Phase, edge: Edge, waits: Iterable[Wait], now: float) -> Picture:
    """A barrier opened: a phase begins or ends, and somebody may have waited long."""
    if round != picture.round:
        picture = replace(picture, longest=picture.gathering, gathering=None)
    worst = max((each for each in waits if each.last), key=lambda each: each.seconds, default=None)
    if worst and (picture.gathering is None or worst.seconds > picture.gathering.wait.seconds):
        picture = replace(picture, gathering=LongWait(place(round, phase, edge), worst))
    begins = edge == Edge.START
    return replace(
        picture,
        round=round,
        phase=phase if begins else picture.phase,
        since=now if begins else picture.since,
        played=(0, 0) if begins else picture.played,
        busy={},
        shut=None,
    )


def noted(picture: Picture, rows: Sequence[Row]) -> Picture:
    """The rows of a round or of an evaluation are in."""
    trained = findings.trained(rows)
    rewards = dict(picture.rewards)
    for row in trained:
        reward, agent = findings.number(row, "reward_mean"), str(row.get("agent", ""))
        if reward is not None:
            rewards[agent] = (*rewards.get(agent, ()), reward)
    return replace(
        picture,
        done=max([picture.done, *map(findings.round_of, trained)]),
        latest={**picture.latest, **{str(row.get("agent", "")): row for row in trained}},
        rewards=rewards,
        evaluations=(*picture.evaluations, *(row for row in rows if findings.evaluated(row))),
    )


def time_left(picture: Picture, now: float) -> float | None:
    """Seconds until the last round ends, if it goes on as it went; None before the first round is over."""
    if picture.facts is None or not picture.done:
        return None
    return (now - picture.began) / picture.done * (picture.facts.rounds - picture.done)


def draw(picture: Picture, now: float, width: int) -> RenderableType:
    """The view, under 18 lines and for 80 columns or more."""
    facts = picture.facts
    if facts is None:
        return Text("waiting for the run to be admitted", style="dim")
    lines: list[RenderableType] = [
        _cut(Text.assemble((facts.scenario, "bold cyan"), "  ", (readable(facts.about), "italic"))),
        _cut(Text(f"model {facts.model} · seed {facts.seed} · {facts.out}", style="dim")),
        Text(""),
        _bar(facts, picture, now, width),
        _cut(_phase(picture, now)),
        _cut(_waiting(picture)),
        Text(""),
        _agents(facts, picture, width),
    ]
    lines += [_cut(text) for text in (_speed(picture), *_evaluations(picture, width)) if text]
    return Group(*lines)


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _bar(facts: RunFacts, picture: Picture, now: float, width: int) -> RenderableType:
    left = time_left(picture, now)
    words = f"round {picture.round}/{facts.rounds} · {clock(now - picture.began)} gone"
    words += f" · {clock(left)} left" if left is not None else ""
    size = max(10, min(60, width - len(words) - 3))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(facts.rounds, picture.done, size, complete_style="cyan", finished_style="green"), words)
    return grid


def _phase(picture: Picture, now: float) -> Text:
    if picture.ended:
        return Text("the run is over", style="bold")
    if picture.phase is None:
        return Text("before the first barrier", style="dim")
    text = Text.assemble((WORDS[picture.phase], "bold"), f"  {clock(now - picture.since)}")
    done, of = picture.played
    if of and picture.phase != Phase.UPDATE:
        text.append(f"  {done}/{of} episodes")
    if picture.busy:
        text.append("  " + ", ".join(f"{agent}: {what}" for agent, what in picture.busy.items()))
    return text


def _waiting(picture: Picture) -> Text:
    if picture.shut and not picture.ended:
        here = ", ".join(picture.shut.arrived)
        verb = "waits" if len(picture.shut.arrived) == 1 else "wait"
        who = f"{here} {verb}" if here else "waiting"
        return Text(f"{who} at {picture.shut.where} for {', '.join(picture.shut.missing)}", style="yellow")
    parts = [_waiting_now(picture)]
    longest = picture.longest
    if longest and longest.wait.seconds >= SHORT_WAIT:
        wait = longest.wait
        parts.append(f"longest wait: {wait.member} {took(wait.seconds)} for {wait.last} at {longest.where}")
    return Text(" · ".join(filter(None, parts)) or "nobody waits", style="dim")


def _waiting_now(picture: Picture) -> str:
    """Who is through with this phase and for whom it waits, as far as this process can see; "" if nobody waits."""
    if picture.facts is None or picture.phase is None or picture.ended:
        return ""
    names = [agent.name for agent in picture.facts.agents]
    done, of = picture.played
    if picture.phase == Phase.UPDATE:
        here = [name for name in names if picture.busy.get(name) == ARRIVED]
        others = _some([name for name in names if name not in here])
    else:
        here = names if done < of else []
        others = f"{of - done} episodes"
    if not here or (len(here) == len(names) and picture.phase == Phase.UPDATE):
        return ""
    verb = "waits" if len(here) == 1 else "wait"
    return f"{_some(here)} {verb} at {place(picture.round, picture.phase, Edge.END)} for {others}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} agents"


def _agents(facts: RunFacts, picture: Picture, width: int) -> Table:
    """The agents in the last finished round. Their sparklines have one scale: that of all rewards so far."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    headline = facts.headline or "reward std"
    table.add_column("agent", no_wrap=True, max_width=16)
    for name in ("played with", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("so far", no_wrap=True)
    table.add_column(headline, justify="right", no_wrap=True, max_width=12)
    for name in ("entropy", "grad norm"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = len(facts.agents) if len(facts.agents) <= SHOWN_AGENTS else SHOWN_AGENTS - 1
    key = f"measure/{facts.headline}" if facts.headline else "reward_std"
    scale = span((each for history in picture.rewards.values() for each in history), LEAST_SPAN)
    names = max((len(agent.name) for agent in facts.agents[:shown]), default=0)
    room = width - min(16, max(names, len("agent"))) - min(12, len(headline)) - OTHER_COLUMNS
    for agent in facts.agents[:shown]:
        row = picture.latest.get(agent.name, {})
        version = findings.number(row, "version")
        table.add_row(
            Text(agent.name, style="bold"),
            "frozen" if agent.trains == "frozen" else f"v{version:.0f}" if version is not None else "–",
            _coloured(findings.number(row, "reward_mean")),
            Text(sparkline(picture.rewards.get(agent.name, ()), max(6, min(24, room)), scale), style="cyan"),
            plain(findings.number(row, key)),
            plain(findings.number(row, "entropy")),
            plain(findings.number(row, "grad_norm")),
        )
    if shown < len(facts.agents):
        table.add_row(Text(f"and {len(facts.agents) - shown} more", style="dim"))
    return table


def _coloured(reward: float | None) -> Text:
    style = "" if reward is None else "green" if reward > 0 else "red" if reward < 0 else ""
    return Text(signed(reward), style=style)


def _speed(picture: Picture) -> Text | None:
    """Tokens and seconds of the last finished round."""
    rows = list(picture.latest.values())
    parts = speed(rows)
    return Text("last round: " + " · ".join(parts), style="dim") if parts else None


def speed(rows: Sequence[Row]) -> list[str]:
    """Tokens per second and seconds per phase of one round's rows, as far as they are known."""
    rates = [rate for row in rows if (rate := findings.number(row, "tokens_per_second")) is not None]
    spent = findings.seconds(rows)
    parts = [f"{phase} {took(spent[phase])}" for phase in ("rollout", "update") if phase in spent]
    share = findings.coordination_share(spent)
    parts += [f"coordination {share:.1%}"] if share is not None else []
    return [f"{max(rates):,.0f} tok/s", *parts] if rates else parts


def _evaluations(picture: Picture, width: int) -> list[Text]:
    """Each evaluation from its first round to its latest; the sampled ones, if there are any. Lines break between evaluations."""
    found = findings.evaluations(picture.evaluations)
    sampled = {what.replace(", sampled", ""): points for what, points in found.items() if ", sampled" in what}
    words = []
    for what, points in (sampled or found).items():
        first, last = points[min(points)], points[max(points)]
        words.append(f"{what} {plain(first)}" + (f" → {plain(last)}" if len(points) > 1 else ""))
    return _folded(f"evaluation{' (sampled)' if sampled else ''}: ", words, width) if words else []


def _folded(title: str, words: Sequence[str], width: int) -> list[Text]:
    """The words after the title, on as many lines as may be; what has no place is counted at the end."""
    lines = [title + words[0]]
    for number, each in enumerate(words[1:], start=1):
        rest = len(words) - number
        more = f" · and {rest - 1} more" if len(lines) == EVALUATION_LINES and rest > 1 else ""
        if len(f"{lines[-1]} · {each}{more}") <= width:
            lines[-1] += f" · {each}"
        elif len(lines) < EVALUATION_LINES:
            lines.append(" " * len(title) + each)
        else:
            lines[-1] += f" · and {rest} more"
            break
    return [Text(line) for line in lines]
