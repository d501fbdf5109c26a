"""Sees at once when a process of this machine ends: a member that is known to be dead need not be waited for until its lease ends.

The kernel tells it (`pidfd_open`, Linux). Where it cannot, or the process is on another machine, nothing is known and the lease decides.
Somebody who names another process as his own is believed only once his connection has closed, so he harms nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from tinker.protocol.to_coordinator import Hello


class Deaths:
    """Follows the processes of this machine that members say they are. `watch` must run; `ended` is true for good once it was."""

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self._followed: set[int] = set()
        self._ended: set[int] = set()
        self._tasks: TaskGroup | None = None
        self._tell: Callable[[], None] = lambda: None

    async def watch(self, tell: Callable[[], None]) -> None:
        """Until cancelled; `tell` hears of every end."""
        self._tell = tell
        async with anyio.create_task_group() as self._tasks:
            await anyio.sleep_forever()

    def follow(self, hello: Hello) -> None:
        """From now on the end of this member's process is seen."""
        if hello.machine != self._machine or hello.pid in self._followed or self._tasks is None:
            return
        self._ended.discard(hello.pid)  # the number is used again
        try:
            descriptor = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            self._ended.add(hello.pid)
        except (OSError, AttributeError, OverflowError):  # not this kernel, or no number of a process
            return
        else:
            self._followed.add(hello.pid)
            self._tasks.start_soon(self._until_end, hello.pid, descriptor, name=f"watch process {hello.pid}")

    def ended(self, hello: Hello) -> bool:
        return hello.machine == self._machine and hello.pid in self._ended

    async def _until_end(self, pid: int, descriptor: int) -> None:
        """No deadline: it ends with the process, or with us."""
        try:
            await anyio.wait_readable(descriptor)
        finally:
            self._followed.discard(pid)
            with suppress(OSError):
                os.close(descriptor)
        self._ended.add(pid)
        self._tell()
