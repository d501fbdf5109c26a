"""A task server that drains: it finishes what it has begun, begins nothing more, and says good-bye."""

from __future__ import annotations

from pathlib import Path

import anyio
from server_desk import WORKER, Desk, desk, request

from tinker.protocol.to_coordinator import Bye, Generated
from tinker.protocol.to_taskserver import Cancel


async def let_it_look(here: Desk) -> None:
    """Let the draining server look whether it is finished."""
    await anyio.wait_all_tasks_blocked()
    here.clock.advance(0.1)
    await anyio.wait_all_tasks_blocked()


async def test_with_nothing_to_do_it_leaves_at_once(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        here.server.drain()
        assert await here.hears() == Bye("it was told to stop")
        await here.over.wait()


async def test_it_answers_what_it_has_begun_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        await here.begins(request(0), request(1))
        here.server.drain()
        await let_it_look(here)
        here.says(request(2))
        await let_it_look(here)
        here.open.set()
        answers = [await here.hears(), await here.hears()]
        assert {each.turn.episode.index for each in answers if isinstance(each, Generated)} == {0, 1}
        await let_it_look(here)
        assert await here.hears() == Bye("it was told to stop")
        assert len(here.asked) == 2


async def test_what_is_cancelled_is_waited_for_no_longer(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        await here.begins(request(0))
        here.server.drain()
        asked = request(0)
        here.says(Cancel(asked.turn, asked.seat, WORKER))
        await let_it_look(here)
        assert await here.hears() == Bye("it was told to stop")


async def test_the_grace_time_ends_what_does_not_end(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        await here.begins(request(0))
        here.server.drain()
        await let_it_look(here)
        assert not here.over.is_set()
        here.clock.advance(here.server.grace)
        assert await here.hears() == Bye("it was told to stop")
