"""The curves of a run as one picture: reward, headline measure and evaluations large, entropy and gradient norm small."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.app.progress import Row


def draw(rows: Sequence[Row], headline: str = "") -> bytes | None:
    """A PNG of about 900 x 500; None if matplotlib (the `plot` extra) is not installed or there is nothing to draw."""
    return None
