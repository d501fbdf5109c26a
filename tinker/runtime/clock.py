"""Time as an argument: the real monotonic clock, and one that tests move by hand."""

from __future__ import annotations

import heapq
import time
from typing import Protocol

import anyio
import anyio.lowlevel

LATE = 2.0  # a sleeper woken later than this was stopped meanwhile: it must hear what has arrived before it judges that others are silent


class Clock(Protocol):
    """Seconds since some fixed moment; they never go back, whatever happens to the time of day."""

    def now(self) -> float: ...

    async def sleep_until(self, t: float) -> None:
        """Return when `now() >= t`; at once (after one checkpoint) if that is already so."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep_until(self, t: float) -> None:
        await anyio.sleep(max(0.0, t - time.monotonic()))
        while time.monotonic() < t:  # the event loop may wake a clock tick early
            await anyio.lowlevel.checkpoint()


class ManualClock:
    """Stands still until `advance`. Sleepers that are due wake in the order of their times, ties in the order in which they came."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._came = 0
        self._sleepers: list[tuple[float, int, anyio.Event]] = []

    def now(self) -> float:
        return self._now

    async def sleep_until(self, t: float) -> None:
        if t <= self._now:
            await anyio.lowlevel.checkpoint()
            return
        sleeper = (t, self._came, anyio.Event())
        self._came += 1
        heapq.heappush(self._sleepers, sleeper)
        try:
            await sleeper[2].wait()
        finally:
            if sleeper in self._sleepers:  # cancelled
                self._sleepers.remove(sleeper)
                heapq.heapify(self._sleepers)

    def advance(self, seconds: float) -> None:
        """Move on and wake who is due. They run when the caller awaits next, and all see the time at the end of the step."""
        if seconds < 0:
            raise ValueError(f"time does not go back (asked for {seconds} s)")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            heapq.heappop(self._sleepers)[2].set()

    def next_due(self) -> float | None:
        """When the first sleeper wakes; None: nobody sleeps. `advance` to there, step by step, and no sleeper sees a later time."""
        return self._sleepers[0][0] if self._sleepers else None
