"""The curves of a run as one picture: reward, headline measure and evaluations large, entropy and gradient norm small."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.app import findings
from coordinator.app.progress import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 5  # rounds in the average that the thick line shows
AGENTS = ("#2066a8", "#d1603d", "#3aa0a0", "#c2407a", "#7a6a2f", "#5a5fc0")
EVALUATIONS = ("#3d8c5a", "#8e5aa8", "#b58900", "#8a4b3c")
HEADLINE = "#5b6b7a"
MARKERS = {"greedy": "o", "sampled": "s"}


def draw(rows: Sequence[Row], headline: str = "") -> bytes | None:
    """A PNG of 900 x 500; None if matplotlib (the `plot` extra) is not installed or no row has a number to draw."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not any(findings.number(row, key) is not None for row in rows for key in ("reward_mean", "value")):
        return None
    plain: dict[Any, Any] = {
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
    }
    with matplotlib.rc_context(plain), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the font lacks is drawn as boxes
        figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        _panels(figure, rows, headline)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    return picture.getvalue()


def _panels(figure: Figure, rows: Sequence[Row], headline: str) -> None:
    grid = figure.add_gridspec(2, 3)
    trained = findings.trained(rows)
    reward = figure.add_subplot(grid[0, :2])
    _per_agent(reward, trained, "reward", lambda row: findings.number(row, "reward_mean"))
    below = figure.add_subplot(grid[1, :2])
    if headline:
        _headline(below, trained, headline)
    _evaluations(below, [row for row in rows if findings.evaluated(row)])
    below.set_title(" and ".join(filter(None, (headline, "evaluations"))), loc="left", fontweight="bold")
    for place, key in ((0, "entropy"), (1, "grad_norm")):
        small = figure.add_subplot(grid[place, 2])
        _per_agent(small, trained, key.replace("_", " "), lambda row, key=key: findings.number(row, key))  # type: ignore[misc]
        small.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.margins(x=0.02)
    for axes in (reward, below):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, ncols=2)
    below.set_xlabel("round")
    figure.axes[-1].set_xlabel("round")


def _per_agent(axes: Axes, rows: Sequence[Row], title: str, value: Callable[[Row], float | None]) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    for number, agent in enumerate(findings.agents(rows)):
        points = [
            (findings.round_of(row), found)
            for row in rows
            if row.get("agent") == agent and (found := value(row)) is not None
        ]
        _line(axes, points, agent, AGENTS[number % len(AGENTS)])


def _headline(axes: Axes, rows: Sequence[Row], headline: str) -> None:
    """The measure per round; the agents' average, which for a measure of the whole table is the measure itself."""
    rounds = sorted({findings.round_of(row) for row in rows})
    averages = [
        findings.mean((r for r in rows if findings.round_of(r) == each), f"measure/{headline}") for each in rounds
    ]
    points = [(each, average) for each, average in zip(rounds, averages, strict=True) if average is not None]
    _line(axes, points, f"{headline} in training", HEADLINE)


def _evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    """One line of points per evaluation and mode (and per agent, if the agents' values differ)."""
    for number, (what, points) in enumerate(findings.evaluations(rows).items()):
        mode = next((each for each in MARKERS if each in what.split(", ")), "")
        axes.plot(
            list(points),
            list(points.values()),
            marker=MARKERS.get(mode, "D"),
            linestyle="--",
            linewidth=1,
            markersize=5,
            color=EVALUATIONS[number % len(EVALUATIONS)],
            label=what,
        )


def _line(axes: Axes, points: Sequence[tuple[int, float]], label: str, colour: str) -> None:
    """Every round thin, and the average of the last rounds thick."""
    if not points:
        return
    rounds = [each for each, _ in points]
    values = [value for _, value in points]
    windows = [values[max(0, k + 1 - SMOOTH) : k + 1] for k in range(len(values))]
    axes.plot(rounds, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(rounds, [sum(each) / len(each) for each in windows], color=colour, linewidth=2, label=label)
