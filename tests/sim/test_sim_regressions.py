"""Histories that once went wrong, each with what was wrong then."""

from __future__ import annotations

import pytest
from sim_faults import Plan
from sim_world import play


@pytest.mark.parametrize("seed", [19, 21])
def test_a_host_that_is_suspended_while_it_joins_goes_on_waiting(seed: int) -> None:
    """It counted the time in which it did not run, and said that no coordinator answers."""
    play(seed, Plan(3, 1, ("slow_network", "jump", "jump", "jump")))
