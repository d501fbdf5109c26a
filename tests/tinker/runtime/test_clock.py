"""Clocks: what a sleeper may rely on."""

from __future__ import annotations

import anyio
import pytest

from tinker.runtime.clock import Clock, ManualClock, MonotonicClock


async def _sleepers(clock: Clock, times: list[float], woken: list[float], group: anyio.abc.TaskGroup) -> None:
    async def sleep(t: float) -> None:
        await clock.sleep_until(t)
        woken.append(t)

    for t in times:
        group.start_soon(sleep, t)
    await anyio.wait_all_tasks_blocked()


async def test_nobody_wakes_before_their_time_and_the_due_wake_in_order() -> None:
    clock, woken = ManualClock(100.0), list[float]()
    async with anyio.create_task_group() as group:
        await _sleepers(clock, [103.0, 101.0, 102.0], woken, group)
        clock.advance(0.5)
        await anyio.wait_all_tasks_blocked()
        assert woken == [] and clock.next_due() == 101.0
        clock.advance(1.5)
        await anyio.wait_all_tasks_blocked()
        assert woken == [101.0, 102.0] and clock.now() == 102.0
        clock.advance(1.0)
    assert woken == [101.0, 102.0, 103.0] and clock.next_due() is None


async def test_a_time_already_past_does_not_wait() -> None:
    clock = ManualClock(5.0)
    await clock.sleep_until(5.0)
    await MonotonicClock().sleep_until(0.0)


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock, woken = ManualClock(), list[float]()
    async with anyio.create_task_group() as group:
        await _sleepers(clock, [1.0], woken, group)
        group.cancel_scope.cancel()
    assert clock.next_due() is None
    clock.advance(2.0)
    assert woken == []


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        ManualClock().advance(-1.0)


async def test_the_real_clock_never_returns_early() -> None:
    clock = MonotonicClock()
    for _ in range(20):
        until = clock.now() + 0.0005
        await clock.sleep_until(until)
        assert clock.now() >= until
