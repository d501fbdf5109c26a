"""Numbers as a terminal or a page shows them: rewards, times, and a history as a sparkline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇"  # without the full block, so that one line does not touch the next
NOTHING = "–"


def signed(value: float | None) -> str:
    """A reward: sign and two decimals."""
    return NOTHING if value is None else f"{value:+.2f}"


def plain(value: float | None) -> str:
    """A measure: three significant digits, without exponents between 0.01 and 10,000."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.1e}"
    if size >= 0.1 or size == 0:
        return f"{value:.2f}" if size < 100 else f"{value:.0f}"
    return f"{value:.3f}" if size >= 0.001 else f"{value:.0e}"


def took(seconds: float | None) -> str:
    """A short time: 0.94 s, 12.3 s, 4:05."""
    if seconds is None:
        return NOTHING
    if seconds >= 100:
        return clock(seconds)
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any: 1:32, 2:05:09."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(values: Iterable[float], least: float) -> tuple[float, float]:
    """The least and the greatest of the values; about the same middle, but `least` wide, if they are closer together."""
    found = list(values) or [0.0]
    low, high = min(found), max(found)
    if high - low >= least:
        return low, high
    return (low + high - least) / 2, (low + high + least) / 2


def sparkline(values: Sequence[float], width: int, scale: tuple[float, float] | None = None) -> str:
    """The whole history in at most `width` characters: each is the average of its share, on this scale (None: from the least of these
    averages to the greatest)."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * k // count for k in range(count + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    least, most = scale or (min(points), max(points))
    if most <= least:
        return BARS[3] * count
    top = len(BARS) - 1
    return "".join(BARS[max(0, min(top, int((point - least) / (most - least) * len(BARS))))] for point in points)


def readable(text: str) -> str:
    """Text of a model or of an error without the control characters that would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
