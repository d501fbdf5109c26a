"""Charts of a run as SVG for a page: drawn by matplotlib, coloured by the page.

Every colour that is drawn stands for one of the page: `currentColor` for text and axes, `var(--...)` for the rest (`COLOURS`), so one
drawing reads well on a dark page and on a light one. Nothing in the SVG refers to anything outside of it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from coordinator.app.curves import AGENTS, EVALUATIONS, STYLES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

INK, PAPER, REST = "#010101", "#fefefe", "#9a9a9b"
COLOURS = {
    INK: "currentColor",
    PAPER: "var(--paper)",
    REST: "var(--rest)",
    **{colour: f"var(--a{number})" for number, colour in enumerate(AGENTS)},
    **{colour: f"var(--e{number})" for number, colour in enumerate(EVALUATIONS)},
}
WIDTH, HEIGHT = 4.6, 1.6  # inches; HEIGHT is of the axes
LEFT, RIGHT, BELOW = 0.52, 0.1, 0.42  # of the axes, for what their ticks say
ROW = 0.17  # of a legend
MOST = 300  # points of a line; more are averaged together
LEGEND = 52  # letters of a legend that fit beside each other
PLAIN: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. `colour`: one of `COLOURS`. `marked`: its points are few, and each is shown."""

    label: str
    points: Points
    colour: str
    style: str = "-"
    marked: bool = False


def of_agent(number: int, label: str, points: Points) -> Line:
    return Line(label, points, AGENTS[number % len(AGENTS)], STYLES[number // len(AGENTS) % len(STYLES)])


def of_evaluation(number: int, label: str, points: Points, *, dashed: bool) -> Line:
    return Line(label, points, EVALUATIONS[number % len(EVALUATIONS)], "--" if dashed else "-", marked=True)


def lines_chart(title: str, lines: Sequence[Line], *, from_zero: bool = False) -> str:
    """Lines over rounds; "" if there is nothing to draw. `from_zero`: the axis begins there."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    with axes_of(title, room([line.label for line in lines])) as (axes, pictures):
        for line in lines:
            xs, ys = zip(*thinned(line.points), strict=True)
            alone = len(xs) == 1 or line.marked
            axes.plot(
                xs,
                ys,
                color=line.colour,
                linestyle=line.style,
                linewidth=1.4,
                label=line.label,
                marker="o" if alone else "",
                markersize=4,
                markerfacecolor=PAPER if line.style == "--" else line.colour,
                clip_on=False,
            )
        if from_zero:
            axes.set_ylim(bottom=0)
        _over_rounds(axes)
        legend(axes, *axes.get_legend_handles_labels())
    return pictures[0]


def stacked_chart(title: str, rounds: Sequence[float], parts: dict[str, Sequence[float]]) -> str:
    """What each round is made of, one part on the other; "" without rounds."""
    if not rounds or not parts:
        return ""
    with axes_of(title, room(list(parts))) as (axes, pictures):
        series = [thinned(list(zip(rounds, values, strict=True))) for values in parts.values()]
        below = [0.0] * len(series[0])
        width = (series[0][-1][0] - series[0][0][0] + 1) / len(series[0]) * 0.9
        for number, (name, points) in enumerate(zip(parts, series, strict=True)):
            heights = [value for _, value in points]
            colour = REST if name == "rest" else EVALUATIONS[number]
            xs = [x for x, _ in points]
            axes.bar(xs, heights, bottom=below, width=width, color=colour, label=name, linewidth=0)
            below = [low + high for low, high in zip(below, heights, strict=True)]
        axes.set_ylabel("seconds")
        _over_rounds(axes)
        legend(axes, *axes.get_legend_handles_labels())
    return pictures[0]


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most `MOST` of them: neighbours are averaged."""
    count = min(MOST, len(points))
    edges = [len(points) * k // count for k in range(count + 1)] if count else []
    shares = [points[edges[k] : edges[k + 1]] for k in range(count)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in shares]


@contextmanager
def axes_of(
    title: str, above: float, height: float = HEIGHT, width: float = WIDTH, left: float = LEFT
) -> Iterator[tuple[Axes, list[str]]]:
    """Axes of this height to draw on, with so much room above for a legend; afterwards the list holds the SVG. In inches."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    pictures: list[str] = []
    with matplotlib.rc_context({**PLAIN, "svg.hashsalt": title}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the font lacks is only measured wrongly
        height += above + BELOW
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        figure.subplots_adjust(left / width, BELOW / height, 1 - RIGHT / width, 1 - above / height)
        yield axes, pictures
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    pictures.append(for_page(drawn.getvalue(), title))


def for_page(svg: str, title: str) -> str:
    """A drawing of matplotlib's as part of a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    size = re.search(r'viewBox="[^"]+"', head)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font-family: [^;\"]+;? ?", "", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", body)
    body = re.sub(r"#[0-9a-f]{6}\b", lambda found: COLOURS.get(found[0], found[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" {size[0] if size else ""}>{body}'


def legend(axes: Axes, lines: Sequence[Artist], names: Sequence[str], letters: int = LEGEND) -> None:
    """The names above the axes, where no line lies beneath."""
    if names:
        columns = _columns(names, letters)
        axes.legend(
            lines, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8,
            borderaxespad=0.2, handlelength=1.6, columnspacing=1.2,
        )  # fmt: skip


def room(names: Sequence[str], letters: int = LEGEND) -> float:
    """Inches above the axes that a legend of these names takes."""
    return 0.12 + ROW * -(-len(names) // _columns(names, letters))


def _columns(names: Sequence[str], letters: int) -> int:
    return max(1, min(len(names), letters // (max(map(len, names), default=0) + 5)))


def _over_rounds(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
