"""The simulated loop: virtual time, an order that only the seed decides, processes that stop, and waits that can never end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from sim_loop import Deadlock, Livelock, LoopClock, SimLoop

HERE = Path(__file__).parent


def cancel_order(seed: int) -> list[int]:
    """The order in which eight tasks of one group hear that they are cancelled."""
    order: list[int] = []

    async def waits(number: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            order.append(number)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(waits, number)
            await anyio.sleep(3600)
            tasks.cancel_scope.cancel()

    loop = SimLoop(seed)
    loop.run_until_complete(main())
    assert loop.time() == 3600
    loop.close()
    return order


def test_time_passes_at_once_and_the_seed_alone_decides_the_order_of_cancelled_tasks() -> None:
    orders = []
    for hash_seed in ("0", "7"):
        code = "import test_sim_loop as t; print([t.cancel_order(seed) for seed in range(4)])"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        orders.append(ran.stdout)
    assert orders[0] == orders[1] == f"{[cancel_order(seed) for seed in range(4)]}\n"
    assert len({tuple(cancel_order(seed)) for seed in range(4)}) > 1


def test_a_wait_that_nothing_can_end_names_the_waiting_task() -> None:
    loop = SimLoop(0)

    async def forlorn() -> None:
        await anyio.Event().wait()

    task = loop.begin("host", forlorn(), "forlorn")
    with pytest.raises(Deadlock, match=r"host: forlorn at .*test_sim_loop\.py"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_a_program_that_spins_is_stopped() -> None:
    loop = SimLoop(0)

    async def spins() -> None:
        while not loop.is_closed():
            await anyio.lowlevel.checkpoint()

    task = loop.create_task(spins())
    with pytest.raises(Livelock):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_a_frozen_process_runs_nothing_and_goes_on_late_when_it_is_thawed() -> None:
    loop = SimLoop(0)
    seen: list[tuple[str, float]] = []

    async def ticks(name: str) -> None:
        for _ in range(3):
            await anyio.sleep(1.0)
            seen.append((name, loop.time()))

    async def main() -> None:
        tasks = [loop.begin(name, ticks(name), name) for name in ("alive", "stopped")]
        await anyio.sleep(1.5)
        loop.freeze("stopped")
        await anyio.sleep(8.5)
        loop.thaw("stopped")
        for task in tasks:
            await task

    loop.run_until_complete(main())
    loop.close()
    assert [time for name, time in seen if name == "alive"] == [1.0, 2.0, 3.0]
    assert [time for name, time in seen if name == "stopped"] == [1.0, 10.0, 11.0]


def test_each_clock_counts_from_its_own_moment_and_a_jump_makes_its_sleepers_late() -> None:
    loop = SimLoop(0)
    clock = LoopClock(loop, begin=500.0)
    woke: list[float] = []

    async def main() -> None:
        assert clock.now() == 500.0
        loop.call_later(1.0, loop.jump, 60.0)
        await clock.sleep_until(502.0)
        woke.append(clock.now())

    loop.run_until_complete(main())
    loop.close()
    assert woke == [561.0]
