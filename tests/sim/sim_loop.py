"""An event loop of virtual time and seeded order: it never waits, and the same seed runs the same program in the same way.

Every callback belongs to a *life*: the task that made it, and the simulated process that the task is part of. Before each turn of the loop
the callbacks that are ready are sorted by the birth of their task (anyio keeps tasks in sets, whose order depends on addresses) and then
shuffled by the seed. The callbacks of a frozen process stay where they are until it is thawed: a stopped or a killed process.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import anyio

TURNS = 200_000  # turns of the loop at one moment of virtual time; more means that something spins


@dataclass(frozen=True, slots=True)
class Life:
    """Which task, counted from the first, and which simulated process it belongs to ("": the simulation itself)."""

    birth: int
    process: str


NOBODY = Life(0, "")
LIFE: ContextVar[Life] = ContextVar("LIFE")


class SimulationError(Exception):
    """The program under simulation cannot go on."""


class Deadlock(SimulationError):
    """Nothing is ready and no timer is set: these tasks wait for ever."""


class Livelock(SimulationError):
    """The program is busy without time passing."""


class SimLoop(asyncio.BaseEventLoop):
    """See the module. No selector, no sockets, no threads, no signals."""

    _ready: deque[asyncio.Handle]  # both are BaseEventLoop's own
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._now = 0.0
        self._order = random.Random(f"order {seed}")
        self._births = 0
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        self._turns = 0
        self.tasks: dict[asyncio.Task[Any], Life] = {}
        self.faults: list[str] = []
        self.set_task_factory(self._born)  # type: ignore[arg-type]
        self.set_exception_handler(self._fault)

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """The machine was suspended: everybody's clock has moved on, and nobody has run meanwhile."""
        self._now += seconds

    def begin(self, process: str, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start the first task of a process."""
        context = copy_context()
        context.run(LIFE.set, Life(0, process))
        return self.create_task(coroutine, name=name, context=context)

    def at(self, when: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Call it then, as nobody's: a process that is frozen meanwhile does not hold it up."""
        self.call_at(when, call, *arguments, context=Context())

    # --- processes ---

    def freeze(self, process: str) -> None:
        """Nothing of this process runs until it is thawed."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: str) -> None:
        self._ready.extend(self._frozen.pop(process, []))

    def is_frozen(self, process: str) -> bool:
        return process in self._frozen

    def of(self, process: str) -> list[asyncio.Task[Any]]:
        """Its tasks that are not done, oldest first."""
        found = [task for task, life in self.tasks.items() if life.process == process and not task.done()]
        return sorted(found, key=lambda task: self.tasks[task].birth)

    # --- the loop ---

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Deadlock(f"at {self._now:.3f} s nothing is ready and no timer is set; waiting:\n{self.waiting()}")
            if scheduled[0].when() > self._now:
                self._now = scheduled[0].when()
                self._turns = 0
        while scheduled and scheduled[0].when() <= self._now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            if not timer.cancelled():
                ready.append(timer)
        self._turns += 1
        if self._turns > TURNS:
            self._turns = 0
            raise Livelock(f"{TURNS} turns of the loop at {self._now:.3f} s; waiting:\n{self.waiting()}")
        if len(ready) == 1:
            batch = [ready.popleft()]
        else:
            batch = sorted(ready, key=_birth)
            ready.clear()
            self._order.shuffle(batch)
        for handle in batch:
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            if self._frozen:
                kept = self._frozen.get(_life(handle).process)
                if kept is not None:
                    kept.append(handle)
                    continue
            handle._run()

    def _born(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._births += 1
        context = context.copy() if context is not None else copy_context()
        life = Life(self._births, context.get(LIFE, NOBODY).process)
        context.run(LIFE.set, life)
        task = asyncio.Task(coro, loop=loop, context=context)
        self.tasks[task] = life
        task.add_done_callback(self.tasks.pop, context=context)
        return task

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    def waiting(self) -> str:
        """The tasks that are not done, with the place where each waits."""
        lines = []
        for task, life in sorted(self.tasks.items(), key=lambda item: item[1].birth):
            stack = task.get_stack(limit=1)
            place = f"{stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else "not started"
            frozen = " (frozen)" if life.process in self._frozen else ""
            lines.append(f"  {life.process or 'simulation'}{frozen}: {task.get_name()} at {place}")
        return "\n".join(lines)

    def _write_to_self(self) -> None:
        """There is nobody to wake."""

    def _process_events(self, event_list: Any) -> None:
        raise SimulationError("the simulation has no events from outside")


class LoopClock:
    """The clock of one simulated process: the loop's time, counted from a moment of its own."""

    def __init__(self, loop: SimLoop, begin: float = 0.0) -> None:
        self._loop = loop
        self._begin = begin

    def now(self) -> float:
        return self._loop.time() + self._begin

    async def sleep_until(self, t: float) -> None:
        await anyio.sleep(max(0.0, t - self.now()))
        while self.now() < t:  # noqa: ASYNC110 (the sum was rounded)
            await anyio.sleep(1e-6)


def run(seed: int, main: Coroutine[Any, Any, None]) -> SimLoop:
    """Run a coroutine to its end on a loop of its own; the loop, closed."""
    loop = SimLoop(seed)
    try:
        loop.run_until_complete(main)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        events.set_event_loop(None)
        loop.close()
    return loop


def _life(handle: asyncio.Handle) -> Life:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(LIFE, NOBODY)


def _birth(handle: asyncio.Handle) -> int:
    return _life(handle).birth
