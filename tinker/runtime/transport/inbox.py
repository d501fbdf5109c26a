"""What both transports share: one receiver that waits without losing anything when it is cancelled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tinker.runtime.transport.interface import Closed

T = TypeVar("T")


class Inbox(Generic[T]):
    """Arrivals that one task takes. `refill` appends to `arrived` what is there now, at most BURST, without waiting.

    Nothing is awaited between taking an arrival and returning it, so a cancelled receiver has taken nothing.
    """

    def __init__(self, what: str, refill: Callable[[], None]) -> None:
        self.arrived: deque[T] = deque()
        self._what = what
        self._refill = refill
        self._waiter: asyncio.Future[None] | None = None
        self._end: Exception | None = None
        self._waited = False  # since arrivals were last there at once

    @property
    def wanted(self) -> bool:
        """Somebody waits."""
        return self._waiter is not None

    def wake(self) -> None:
        """There may be something to take."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, why: Exception | None = None) -> None:
        """Whoever receives hears `why`, after what has arrived. The first reason stays."""
        self._end = self._end or why or Closed(f"{self._what} is closed")
        self.wake()

    async def one(self) -> T:
        if not self.arrived:
            await self._filled()
        return self.arrived.popleft()

    async def many(self) -> list[T]:
        if not self.arrived:
            await self._filled()
        arrived = list(self.arrived)
        self.arrived.clear()
        return arrived

    async def _filled(self) -> None:
        """Wait until something has arrived. No deadline: the caller owns it."""
        if self._waiter is not None:
            raise RuntimeError(f"two tasks receive from {self._what}: let one receive and hand on")
        if not self._waited:
            await asyncio.sleep(0)  # others get their turn although there is always something to take
        self._waited = False
        while not self.arrived:
            if self._end is not None:
                raise self._end
            self._refill()
            if self.arrived:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            self._waited = True
            try:
                await self._waiter
            finally:
                self._waiter = None
