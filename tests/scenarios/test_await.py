"""An act that nobody awaits fails the episode, with the line where it was made; the suite turns Python's own warning into an error."""

# mypy: disable-error-code="unused-coroutine, comparison-overlap"

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, assert_type

import anyio
import pytest
from scenario_fakes import lines, play, scripted

from scenarios import Forfeit, Forfeited, Scores, Seat, Table, scenario
from tinker.protocol.episodes import Episode
from tinker.protocol.values import Ended

EVEN = {"ann": 0.0, "bob": 0.0}
Part = Callable[[Table], Awaitable[object]]


async def played(part: Part) -> Episode:
    """An episode of a scenario with this part in it; `ann` always says 1, `bob` 2."""

    async def duel(table: Table) -> Scores:
        """A test."""
        await part(table)
        return EVEN

    return await play(scenario("ann", "bob", version=1)(duel), scripted(ann=lines("1"), bob=lines("2")))


def line_of(part: Part, text: str) -> str:
    """Where this text is in the part's code, as `file:line`."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = part.__code__.co_firstlineno
    return f"{__file__}:{next(at for at in range(first, len(source)) if text in source[at - 1])}"


def once(act: Any) -> Any:
    """Takes the act for its value in this way."""
    return act


async def _dropped(table: Table) -> None:
    table["ann"].act("?", int)  # here


async def _all_dropped(table: Table) -> None:
    table.act_all("?", int)  # here


async def _returned(table: Table) -> object:
    return {"ann": table["ann"].act("?", float)}  # here


async def _went_on(table: Table) -> None:
    table["ann"].act("?", int)  # here
    await table["bob"].act("?", int)
    raise AssertionError("unreachable")


async def _compared(table: Table) -> None:
    assert table["ann"].act("?", int) == 1  # here


async def _unequal(table: Table) -> None:
    assert table["ann"].act("?", int) != 2  # here


async def _tested(table: Table) -> None:
    assert table["ann"].act("?", int)  # here


async def _indexed(table: Table) -> None:
    once(table.act_all("?", int))["ann"]  # here


async def _iterated(table: Table) -> None:
    list(once(table.act_all("?", int)))  # here


async def _added(table: Table) -> None:
    once(table["ann"].act("?", int)) + 1  # here


async def _of_a_dict(table: Table) -> None:
    once(table.act_all("?", int)).values()  # here


async def _forfeited(table: Table) -> None:
    table["ann"].act("?", int)  # here
    raise Forfeit("ann", "said nothing")


async def _looped(table: Table) -> None:
    while True:
        table["ann"].act("?", int)  # here


async def _caught(table: Table) -> None:
    try:
        assert table["ann"].act("?", int) == 1  # here
    except Exception:
        return


UNAWAITED = [
    _dropped, _all_dropped, _returned, _went_on, _compared, _unequal, _tested, _indexed, _iterated, _added, _of_a_dict, _forfeited,
    _looped, _caught,
]  # fmt: skip


@pytest.mark.parametrize("part", UNAWAITED)
async def test_an_act_that_is_not_awaited_fails_the_episode_and_names_its_line(part: Part) -> None:
    episode = await played(part)
    assert (episode.ended, episode.scores) == (Ended.FAILED, ())
    assert episode.recording.reason.startswith("scenarios.errors.ScenarioError: `act")
    assert f"at {line_of(part, '# here')} was never awaited: write `await " in episode.recording.reason


async def test_what_came_of_the_missing_await_is_said_too() -> None:
    reason = (await played(_added)).recording.reason
    assert "TypeError: unsupported operand" in reason
    assert reason.splitlines()[0] == reason.splitlines()[-1]
    assert "was never awaited" in reason.splitlines()[-1]


async def test_an_act_that_is_not_awaited_asks_nobody() -> None:
    assert (await played(_went_on)).recording.lines == ()


async def test_acts_may_be_made_first_and_awaited_in_their_order() -> None:
    async def later(table: Table) -> None:
        first, second = table["ann"].act("?", int), table["bob"].act("?", int)
        assert (await first, await second) == (1, 2)

    assert (await played(later)).ended is Ended.FINISHED


async def _in_a_task(table: Table) -> None:
    assert await asyncio.create_task(table["ann"].act("?", int)) == 1


async def _with_a_timeout(table: Table) -> None:
    assert await asyncio.wait_for(table["ann"].act("?", int), 60) == 1


async def _in_a_group(table: Table) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(table["ann"].act, "?", int)


async def _cancelled_before_it_began(table: Table) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(table["ann"].act, "?", int)
        group.cancel_scope.cancel()


async def _closed(table: Table) -> None:
    table["ann"].act("?", int).close()


@pytest.mark.parametrize("part", [_in_a_task, _with_a_timeout, _in_a_group, _cancelled_before_it_began, _closed])
async def test_an_act_can_be_used_wherever_a_coroutine_can(part: Part) -> None:
    episode = await played(part)
    assert (episode.ended, episode.recording.reason) == (Ended.FINISHED, "")


async def test_an_act_that_is_awaited_twice_fails_the_episode() -> None:
    async def twice(table: Table) -> None:
        act = table["ann"].act("?", int)
        await act
        await act

    assert "is awaited twice; keep what the first `await` returned" in (await played(twice)).recording.reason


async def test_an_act_that_was_awaited_is_still_not_its_value() -> None:
    async def mixed(table: Table) -> None:
        act = once(table["ann"].act("?", int))
        await act
        assert act == 1

    assert "is not the reply; use what `await` returned" in (await played(mixed)).recording.reason


async def types_are_those_of_the_parser(table: Table, seat: Seat) -> None:
    """Never called: `mypy tests/scenarios/test_await.py` reads it."""
    assert_type(await seat.act("?", int), int)
    assert_type(await table.act_all("?", {"ann": len}), dict[str, int | Forfeited])
