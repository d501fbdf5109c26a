"""Nothing about an episode depends on who was first, or on who else is playing."""

from __future__ import annotations

import anyio
from hypothesis import given
from hypothesis import strategies as st
from scenario_fakes import ScriptedTurns, Writing, auction, play, play_crowd, writers

from tinker.protocol.episodes import Episode


@given(st.lists(st.integers(0, 9), min_size=48, max_size=48))
def test_any_order_of_completion_gives_the_same_episode(delays: list[int]) -> None:
    assert anyio.run(play_crowd, delays) == anyio.run(play_crowd, ())


async def test_sixteen_episodes_at_once_equal_their_solo_runs() -> None:
    def scripts(seed: int) -> dict[str, Writing]:
        return {
            "ann": lambda context: f"[{len(context) + seed}]",
            "bob": lambda context: f"[{seed}]" if context.count("?") < seed else "no",
        }

    async def solo(seed: int) -> Episode:
        turns = ScriptedTurns(scripts(seed), [seed % 5, seed % 3, 2])
        return await play(auction, writers("ann", "bob"), turns, seed=seed)

    together: dict[int, Episode] = {}

    async def keep(seed: int) -> None:
        together[seed] = await solo(seed)

    async with anyio.create_task_group() as group:
        for seed in range(16):
            group.start_soon(keep, seed)
    alone = {seed: await solo(seed) for seed in range(16)}
    assert together == alone
    assert len({episode.recording.lines for episode in alone.values()}) == 16
