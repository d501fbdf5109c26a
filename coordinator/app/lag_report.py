"""What overlapping rollouts and updates gave each agent of a run, and what it cost, from its metrics rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.app.findings import agents, number, total, trained
from coordinator.app.progress import Row


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares are of 1, None where nothing is known: of the wall time, what it waited at barriers; of its update time, what passed beside
    rollouts; of its trained tokens' ratios, those clipped and truncated. `lag_mean` is over trained tokens. `refused`: sequences and
    tokens beyond the bound."""

    agent: str
    waited: float | None
    update_seconds: float
    overlapped: float | None
    lag_mean: float | None
    lag_max: int
    clipped: float | None
    truncated: float | None
    refused: tuple[int, int]


def overlaps(rows: Sequence[Row]) -> tuple[Overlap, ...]:
    """One for each agent, if any of them may lag."""
    if not any("lag_max" in row for row in rows):
        return ()
    return tuple(_overlap(agent, trained(rows, agent)) for agent in agents(trained(rows)))


def waited_share(rows: Sequence[Row]) -> float | None:
    """Which part of the training rounds' wall time the agent of these rows waited at barriers."""
    whole = total(rows, "seconds/round")
    waits = sum(
        total(rows, key) for key in dict.fromkeys(key for row in rows for key in row if key.startswith("wait/"))
    )
    return waits / whole if whole else None


def _overlap(agent: str, rows: Sequence[Row]) -> Overlap:
    spent = total(rows, "update_seconds")
    return Overlap(
        agent,
        waited_share(rows),
        spent,
        total(rows, "overlap_seconds") / spent if spent else None,
        _by_tokens(rows, "lag_mean"),
        int(max((number(row, "lag_max") or 0.0 for row in rows), default=0.0)),
        _by_tokens(rows, "clip_fraction"),
        _by_tokens(rows, "truncated_fraction"),
        (int(total(rows, "count/stale")), int(total(rows, "count/stale_tokens"))),
    )


def _by_tokens(rows: Sequence[Row], key: str) -> float | None:
    """The mean over all trained tokens of what the rows say about theirs."""
    having = [(value, number(row, "tokens_trained") or 0.0) for row in rows if (value := number(row, key)) is not None]
    tokens = sum(count for _, count in having)
    return sum(value * count for value, count in having) / tokens if tokens else None
