"""Which charts a report shows: rewards, measures and evaluations, spread, entropy, KL, gradients, incidents, time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.app import findings
from coordinator.app.charts import Line, lines_chart, of_agent, of_evaluation, stacked_chart
from coordinator.app.progress import Row

MEASURES = 4  # besides the headline
Value = Callable[[Row], float | None]


def charts(rows: Sequence[Row], headline: str = "") -> list[tuple[str, str]]:
    """Titles and SVGs, the most important first; what nobody measured is left out."""
    trained = findings.trained(rows)
    free = {
        "Reward": _by_agent(trained, "reward_mean"),
        "Evaluations": _evaluations(rows),
        **{f"{name} in training": _by_agent(trained, f"measure/{name}") for name in _measures(trained, headline)},
        "KL to the base model (nats per token)": _by_agent(trained, "kl"),
    }
    from_zero = {
        "Reward spread (standard deviation)": _by_agent(trained, "reward_std"),
        "Entropy (nats per token)": _by_agent(trained, "entropy"),
        "Gradient norm, before clipping": _by_agent(trained, "grad_norm"),
        "Forfeits per episode": _share(trained, "forfeits"),
        "Retries per episode": _share(trained, "retries"),
        "Sequences cut off by a limit (share)": _share(trained, "cut", "rows"),
        "Groups of equal scores (share)": _share(trained, "groups_without_signal", "groups"),
    }
    drawn = {title: lines_chart(title, lines) for title, lines in free.items()}
    drawn |= {title: lines_chart(title, lines, from_zero=True) for title, lines in from_zero.items()}
    drawn["Time per round, by phase"] = _time(trained)
    return [(title, svg) for title, svg in drawn.items() if svg]


def _measures(rows: Sequence[Row], headline: str) -> list[str]:
    names = dict.fromkeys(key.removeprefix("measure/") for row in rows for key in row if key.startswith("measure/"))
    others = [name for name in names if name != headline][:MEASURES]
    return [*([headline] if headline in names else []), *others]


def _by_agent(rows: Sequence[Row], key: str) -> list[Line]:
    """A line for each agent; one, if all have the same numbers."""
    lines = _lines(rows, lambda row: findings.number(row, key))
    if len(lines) > 1 and all(line.points == lines[0].points for line in lines):
        return [of_agent(0, "all agents", lines[0].points)]
    return lines


def _share(rows: Sequence[Row], key: str, of: str = "episodes") -> list[Line]:
    """So many for each of the others; nothing to draw if there never were any."""
    if not findings.total(rows, key):
        return []

    def share(row: Row) -> float | None:
        count, whole = findings.number(row, key), findings.number(row, of)
        return count / whole if count is not None and whole else None

    return _lines(rows, share)


def _lines(rows: Sequence[Row], value: Value) -> list[Line]:
    return [
        of_agent(
            number,
            agent,
            [
                (findings.round_of(row), found)
                for row in rows
                if row.get("agent") == agent and (found := value(row)) is not None
            ],
        )
        for number, agent in enumerate(findings.agents(rows))
    ]


def _evaluations(rows: Sequence[Row]) -> list[Line]:
    """A colour for each evaluation and agent, dashed where it was sampled."""
    lines = findings.evaluation_lines(rows)
    colours = list(dict.fromkeys((name, agent) for name, _, agent in lines))
    return [
        of_evaluation(
            colours.index((name, agent)),
            ", ".join(filter(None, (name, mode, agent))),
            list(points.items()),
            dashed=mode == "sampled",
        )
        for (name, mode, agent), points in lines.items()
    ]


def _time(rows: Sequence[Row]) -> str:
    """Seconds of each round by phase."""
    by_round = {findings.round_of(row): row for row in rows if findings.number(row, "seconds/round") is not None}
    parts: dict[str, list[float]] = {
        phase: [findings.number(row, f"seconds/{phase}") or 0.0 for row in by_round.values()]
        for phase in ("rollout", "update")
    }
    whole = [findings.number(row, "seconds/round") or 0.0 for row in by_round.values()]
    parts["rest"] = [
        max(0.0, each - sum(of)) for each, of in zip(whole, zip(*parts.values(), strict=True), strict=True)
    ]
    return stacked_chart("Time per round, by phase", list(by_round), dict(parts))
