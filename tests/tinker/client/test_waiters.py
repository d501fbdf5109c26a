"""Who waits for an answer: each gets it, or an error, whoever else is cancelled."""

from __future__ import annotations

import anyio
import pytest

from tinker.client.waiters import CoordinatorLost, Waiters


async def test_one_that_is_cancelled_leaves_the_others_waiting_for_the_same() -> None:
    """Case 31: a waiter inside a barrier is cancelled."""
    waiters, got, impatient = Waiters(), list[object](), anyio.CancelScope()

    async def wait(scope: anyio.CancelScope) -> None:
        with scope:
            got.append(await waiters.get("barrier"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, anyio.CancelScope())
        tasks.start_soon(wait, impatient)
        await anyio.wait_all_tasks_blocked()
        impatient.cancel()
        await anyio.wait_all_tasks_blocked()
        waiters.put("barrier", "open", keep=True)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert got == ["open"]
    assert not waiters.waiting and not waiters.early


async def test_several_get_the_same_answer_and_a_late_one_none() -> None:
    waiters, got = Waiters(), list[object]()

    async def wait() -> None:
        got.append(await waiters.get("barrier"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        waiters.put("barrier", "open")
        waiters.put("barrier", "again")
    assert got == ["open", "open"] and not waiters.waiting


async def test_the_end_answers_everybody_and_whoever_asks_later() -> None:
    waiters = Waiters()

    async def wait() -> None:
        with pytest.raises(CoordinatorLost):
            await waiters.get("turn")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        waiters.break_all(CoordinatorLost("gone"))
    await wait()
