"""The curves of a run as one picture: reward, headline measure and evaluations large, entropy and gradient norm small."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from coordinator.app import findings
from coordinator.app.progress import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 5  # rounds in the average that the thick line shows
AGENTS = ("#2066a8", "#d1603d", "#3aa0a0", "#c2407a", "#7a6a2f", "#5a5fc0")
STYLES = ("-", "--", ":", "-.")  # for more agents than there are colours
EVALUATIONS = ("#3d8c5a", "#8e5aa8", "#d99a00", "#1f9ed1", "#c8432f", "#6b4a2f", "#e377c2", "#7f9c1f")
HEADLINE = "#5b6b7a"
MARKERS = "os^Dv*"  # an evaluation whose value differs from agent to agent
SIZE = (9.0, 5.0)  # inches of 100 pixels
LETTERS = 135  # of a legend's font fit beside each other
ROWS = 3  # of legends fit in the picture; each more makes it higher
ROW = 0.18  # inches


def draw(rows: Sequence[Row], headline: str = "") -> bytes | None:
    """A PNG of 900 x 500, higher if its legends are long.

    None if matplotlib (the `plot` extra) is not installed or no row has a number to draw.
    """
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
        figure = Figure(figsize=SIZE, dpi=100, layout="constrained")
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
    below.set_xlabel("round")
    figure.axes[-1].set_xlabel("round")
    rows_of_legends = _legend(figure, reward, "outside upper left") + _legend(figure, below, "outside lower left")
    figure.set_figheight(SIZE[1] + ROW * max(0, rows_of_legends - ROWS))


def _legend(figure: Figure, axes: Axes, place: Literal["outside upper left", "outside lower left"]) -> int:
    """The lines of these axes named outside all axes, so that no curve lies beneath. Returns how many rows that takes."""
    lines, names = axes.get_legend_handles_labels()
    if not lines:
        return 0
    columns = max(1, min(len(names), LETTERS // (max(map(len, names)) + 8)))
    figure.legend(lines, names, loc=place, frameon=False, fontsize=8, ncols=columns)
    return -(-len(names) // columns)


def _per_agent(axes: Axes, rows: Sequence[Row], title: str, value: Callable[[Row], float | None]) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    for number, agent in enumerate(findings.agents(rows)):
        points = [
            (findings.round_of(row), found)
            for row in rows
            if row.get("agent") == agent and (found := value(row)) is not None
        ]
        _line(axes, points, agent, AGENTS[number % len(AGENTS)], STYLES[number // len(AGENTS) % len(STYLES)])


def _headline(axes: Axes, rows: Sequence[Row], headline: str) -> None:
    """The measure per round; the agents' average, which for a measure of the whole table is the measure itself."""
    rounds = sorted({findings.round_of(row) for row in rows})
    averages = [
        findings.mean((r for r in rows if findings.round_of(r) == each), f"measure/{headline}") for each in rounds
    ]
    points = [(each, average) for each, average in zip(rounds, averages, strict=True) if average is not None]
    _line(axes, points, f"{headline} in training", HEADLINE)


def _evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    """A line of points each: an evaluation is a colour, a mode is how line and marker are drawn, an agent (if they differ) a marker.

    Later lines have smaller markers, so that those of equal values show as rings around each other.
    """
    lines = findings.evaluation_lines(rows)
    names = list(dict.fromkeys(name for name, _, _ in lines))
    agents = list(dict.fromkeys(agent for _, _, agent in lines))
    for number, ((name, mode, agent), points) in enumerate(lines.items()):
        turn, colour = divmod(names.index(name), len(EVALUATIONS))
        sampled = mode == "sampled"
        axes.plot(
            list(points),
            list(points.values()),
            marker=MARKERS[(agents.index(agent) + turn) % len(MARKERS)],
            markerfacecolor="white" if sampled else EVALUATIONS[colour],
            linestyle="--" if sampled else "-",
            linewidth=1,
            markersize=max(4.0, 8.0 - 0.8 * number),
            color=EVALUATIONS[colour],
            label=", ".join(filter(None, (name, mode, agent))),
            clip_on=False,
        )


def _line(axes: Axes, points: Sequence[tuple[int, float]], label: str, colour: str, style: str = "-") -> None:
    """Every round thin, and the average of the last rounds thick."""
    if not points:
        return
    rounds = [each for each, _ in points]
    values = [value for _, value in points]
    windows = [values[max(0, k + 1 - SMOOTH) : k + 1] for k in range(len(values))]
    axes.plot(rounds, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(
        rounds, [sum(each) / len(each) for each in windows], color=colour, linewidth=2, linestyle=style, label=label
    )
