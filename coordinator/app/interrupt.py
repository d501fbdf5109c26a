"""What SIGINT and SIGTERM do to `opentinker run`: the first stops it in good order, the second ends everything at once.

Handlers are Python's own and not the event loop's: they run even while scenario code computes without ever awaiting.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import anyio

from coordinator.app.launch import Child
from coordinator.app.training import Training

DRAIN = 20.0  # seconds a drain may take before the run is cut off
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(
    slots=True, repr=False
)  # the signal module takes the repr of its handlers, and ours would be that of the whole run
class Interrupt:
    """Use as a context manager inside the event loop. What the first signal does depends on how far we are: it cancels `scope` while
    the run is being started, and drains the run once there is a `training`. `spool` is removed when everything ends at once."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    training: Training | None = None
    children: list[Child] = field(default_factory=list)
    spool: Path | None = None
    _told: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Interrupt:
        self._loop = asyncio.get_running_loop()
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Between two bytecodes of the main thread, whatever it is doing."""
        self._told += 1
        if self._told > 1:
            self._end(number)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(number).name)

    def _stop(self, name: str) -> None:
        if self.training is None:
            self.scope.cancel()
        else:
            self.training.stop(f"interrupted by {name}")
            self.scope.deadline = anyio.current_time() + DRAIN

    def _end(self, number: int) -> None:
        for child in self.children:
            child.kill()
        if self.spool is not None:
            shutil.rmtree(self.spool, ignore_errors=True)
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            b"\ninterrupted twice: ended at once; finished rounds are kept\n",
        )
        os._exit(128 + number)
