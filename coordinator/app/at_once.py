"""Several things at once, of which the first that fails ends the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio


async def at_once(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Make them all at once. The first that fails ends the others, and its exception is raised as it is (not in a group)."""
    failures: list[Exception] = []

    async def guarded(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(guarded, call)
    if failures:
        raise failures[0]
