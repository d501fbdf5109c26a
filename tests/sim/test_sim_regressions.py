"""Histories that once went wrong, each with what was wrong then."""

from __future__ import annotations

import pytest
from sim_faults import Plan
from sim_world import World, play


@pytest.mark.parametrize("seed", [19, 21])
def test_a_host_that_is_suspended_while_it_joins_goes_on_waiting(seed: int) -> None:
    """It counted the time in which it did not run, and said that no coordinator answers."""
    play(seed, Plan(3, 1, ("slow_network", "jump", "jump", "jump")))


def test_an_operation_keeps_its_outcome_when_the_coordinators_machine_fails() -> None:
    """Outcomes were not on disk before they left: the machine failed, the task server died, and what was done was said to have failed."""
    play(34, Plan(3, 2, ("kill_machine", "cut", "kill_machine", "kill_server")))


@pytest.mark.parametrize("seed", [1, 4])
def test_who_has_heard_an_old_coordinator_still_finds_the_new_one_when_that_restarts(seed: int) -> None:
    """It heard nothing of a lower epoch, and not either that the new one knew it no longer."""
    play(seed, Plan(2, 2, ("kill_coordinator", "old_coordinator", "kill_machine", "old_coordinator")))


def test_a_further_host_delivers_where_the_update_worker_is_now() -> None:
    """Its task server died unseen, another one took its place, and the further host went on delivering to the dead one."""
    play(80, Plan(2, 1, ("kill_server", "stale_answers", "freeze")))


def test_a_group_that_was_dealt_is_not_dealt_to_another_host_when_the_coordinators_machine_fails() -> None:
    """Who had it was not on disk: both played it under the same attempt."""
    play(151, Plan(2, 1, ("kill_machine", "kill_machine")))


def test_a_further_host_that_cannot_deliver_when_its_run_ends_says_so() -> None:
    """It enlists again to hear where to deliver; that the run is over came out of this as a crash, not as its exit."""

    def prepare(world: World) -> None:
        world.given = {"groups": 3, "rounds": 3, "evaluate_every": 0, "concurrency": 64}

        def when_dealt() -> None:
            runs = world.core.runs.values() if world.core is not None else ()
            if not any(each.host == "further0" for run in runs for each in run.dealing.groups.values()):
                world.later(0.02, when_dealt)
                return
            world.disks.gone |= {f"data machine of {name}" for name in world.live}
            world.later(3.0, world.net.cut, "coordinator", "further0")
            world.later(12.0, world.net.heal, "coordinator", "further0")

        world.apart = frozenset({("coordinator", "further0")})
        world.plan_further = lambda: None  # type: ignore[method-assign]
        world.later(0.0, when_dealt)
        for after in (3.1, 3.6):
            world.later(after, lambda: world.further or world.start_further("host0", "stays", 0.0))

    assert play(1, Plan(1, 1, ("kill_host",)), prepare).did["further host ended: finished"] == 1
