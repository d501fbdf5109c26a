"""The simulation finds faults that are planted on purpose (those that take a second; `planted.py` finds them all)."""

from __future__ import annotations

import pytest
from planted import PLANTED, find

QUICK = {
    "lost_wake_up",
    "barrier_opens_early",
    "gate_ignores_order",
    "early_opening_dropped",
    "ready_too_early",
    "one_too_many_accounted",
    "holdings_not_asked",
    "late_answer_counts",
    "rejected_trained_on",
}


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_planted_fault_is_found(name: str) -> None:
    assert find(name, limit=30) is not None


def test_there_are_at_least_ten() -> None:
    assert set(PLANTED) > QUICK
    assert len(PLANTED) >= 10
