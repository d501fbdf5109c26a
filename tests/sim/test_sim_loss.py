"""Strict loss: a network that loses every n-th frame of each connection changes nothing but how long it takes."""

from __future__ import annotations

import pytest
from sim_faults import Plan
from sim_world import World, play

PATIENT = {
    "turn_deadline": 5000.0,
    "episode_deadline": 50_000.0,
}  # a deadline that passes may change a result: none does


def left(seed: int, every: int) -> tuple[object, object, int]:
    """What the run leaves, and how many frames were lost."""
    worlds: list[World] = []

    def prepare(world: World) -> None:
        worlds.append(world)
        world.given = PATIENT
        world.patience = 6000.0
        world.net.every = every

    ran = play(seed, Plan(1, 1, ()), prepare)
    directory = worlds[0].plays["host0"].request.directory
    recordings = sorted(
        (str(each.episode), each.lines, each.scores)
        for phase in directory.recordings.values()  # type: ignore[attr-defined]
        for each in phase
    )
    return recordings, directory.adapters, ran.did["frames lost"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("every", "seed"), [(2, 1), (3, 1), (5, 2)])
def test_every_nth_frame_is_lost_and_the_run_ends_with_the_same_result(every: int, seed: int) -> None:
    recordings, adapters, lost = left(seed, every)
    assert lost > 50
    assert (recordings, adapters) == left(seed, 0)[:2]
