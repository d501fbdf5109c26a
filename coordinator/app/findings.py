"""What the metrics rows of a run say when read together: changes, counts, time per phase, and warnings."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.app.progress import Change, Row


def changes(rows: Sequence[Row], headline: str = "") -> tuple[Change, ...]:
    """Before and after: first 5 against last 10 training rounds, first against last of each evaluation."""
    return ()


def warnings(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the user should know before trusting the run, each in a sentence."""
    return ()
