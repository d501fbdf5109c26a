"""`summary.md`: one page about a finished run."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.app.progress import Row, RunFacts, RunResult


def summary(facts: RunFacts, rows: Sequence[Row], result: RunResult, *, curves: str = "") -> str:
    """The page as Markdown. `curves`: the picture's file name, relative to the page ("": none)."""
    return ""
