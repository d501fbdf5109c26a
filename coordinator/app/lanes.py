"""One round as a swim-lane: who played, waited, computed, stepped and published when, agent by agent and for the workers they ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.app import findings
from coordinator.app.charts import INK, REST, axes_of, legend, room
from coordinator.app.curves import EVALUATIONS
from coordinator.app.progress import Row
from coordinator.app.timeline import WAIT, Span
from tinker.protocol.values import Phase

WORK = ("gradient", "optimizer", "publish", "update")
WAITS = "waits at a barrier"
KINDS = {
    str(Phase.ROLLOUT): EVALUATIONS[3],
    "gradient": EVALUATIONS[4],
    "optimizer": EVALUATIONS[2],
    "publish": EVALUATIONS[1],
    "update": EVALUATIONS[4],
    WAITS: "none",
}
ROLLOUT_WORKERS, UPDATE_WORKERS = "rollout workers", "update workers"
LETTERS = 130  # of the legend fit beside each other
BAR = 0.62  # of a lane's height


def spans_of_a_round(rows: Sequence[Row], timeline: Sequence[Span]) -> tuple[int, list[Span]]:
    """The newest round that was timed, with an update if there is one. Without a timeline (older runs): made of the rows' seconds.

    0 and nothing if no round was timed.
    """
    trained = [span for span in timeline if span.what != str(Phase.EVALUATE) and "evaluate" not in span.what]
    updated = [span.round for span in trained if span.what in WORK]
    if trained:
        round = updated[-1] if updated else trained[-1].round
        return round, [span for span in trained if span.round == round]
    rounds = [findings.round_of(row) for row in findings.trained(rows) if findings.number(row, "seconds/rollout")]
    if not rounds:
        return 0, []
    return rounds[-1], _from_rows([row for row in findings.trained(rows) if findings.round_of(row) == rounds[-1]])


def draw_lanes(round: int, spans: Sequence[Span]) -> str:
    """The SVG; "" without spans."""
    if not spans:
        return ""
    agents = list(dict.fromkeys(span.agent for span in spans if span.agent))
    lanes = [*agents, ROLLOUT_WORKERS, UPDATE_WORKERS]
    zero = min(span.begin for span in spans)
    title = f"Round {round}, lane by lane"
    shown = [kind for kind in KINDS if any(_kind(span) == kind for span in spans)]
    left = 0.2 + 0.075 * max(map(len, lanes))
    with axes_of(title, room(shown, LETTERS), 0.2 + 0.3 * len(lanes), 9.2, left) as (axes, pictures):
        from matplotlib.patches import Patch

        for span in spans:
            at = [(span.begin - zero, span.end - span.begin)]
            for lane in _lanes(span, agents):
                low, high = lanes.index(lane) - BAR / 2, BAR
                if lane == UPDATE_WORKERS:  # at once, so one above the other
                    high /= len(agents)
                    low += agents.index(span.agent) * high
                axes.broken_barh(at, (low, high), **_look(_kind(span)))
        legend(axes, [Patch(**_look(kind)) for kind in shown], shown, LETTERS)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds")
        axes.grid(axis="x")
    return pictures[0]


def waits(spans: Sequence[Span]) -> list[tuple[str, str, float]]:
    """Who waited where and how long, in this round: agent, barrier, seconds."""
    return [(span.agent, span.what.removeprefix(WAIT), span.end - span.begin) for span in spans if WAIT in span.what]


def _kind(span: Span) -> str:
    return WAITS if span.what.startswith(WAIT) else span.what


def _look(kind: str) -> dict[str, Any]:
    if kind == WAITS:
        return {"facecolor": "none", "edgecolor": INK, "hatch": "/////", "linewidth": 0.5}
    return {"facecolor": KINDS.get(kind, REST), "linewidth": 0}


def _lanes(span: Span, agents: Sequence[str]) -> list[str]:
    if not span.agent:
        return [*agents, ROLLOUT_WORKERS]
    return [span.agent, UPDATE_WORKERS] if span.what in WORK else [span.agent]


def _from_rows(rows: Sequence[Row]) -> list[Span]:
    """What the metrics of a round say: it waited, was played, waited, updated and waited."""
    spans: list[Span] = []
    number = findings.number
    starts = max(number(row, f"{WAIT}rollout_start") or 0.0 for row in rows)
    played = starts + (number(rows[0], "seconds/rollout") or 0.0)
    begins = played + max(number(row, f"{WAIT}update_start") or 0.0 for row in rows)
    round = findings.round_of(rows[0])
    for row in rows:
        agent = str(row.get("agent", ""))
        length = number(row, "update_seconds") or number(row, "seconds/update") or 0.0
        after = number(row, f"{WAIT}update_end") or 0.0
        parts = (
            (f"{WAIT}rollout_start", starts - (number(row, f"{WAIT}rollout_start") or 0.0), starts),
            (f"{WAIT}update_start", begins - (number(row, f"{WAIT}update_start") or 0.0), begins),
            ("update", begins, begins + max(0.0, length - after)),
            (f"{WAIT}update_end", begins + max(0.0, length - after), begins + length),
        )
        spans += [Span(round, agent, what, begin, end) for what, begin, end in parts if end > begin]
    return [Span(round, "", str(Phase.ROLLOUT), starts, played), *spans]
