"""The rollout pool's worker: answers `Generate`, serves versions, forgets episodes that are over.

Its mailbox is the pool's queue. At most `capacity` requests are in the engine at once; the engine batches them. Every request gets exactly
one answer, `Generated` or `GenerateFailed`, unless it was cancelled (then nobody waits for it).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from tinker.engines.engine import Engine, EngineError, Files, GenerateRequest
from tinker.protocol.to_coordinator import Generated, GenerateFailed, Loaded, LoadFailed
from tinker.protocol.to_taskserver import Cancel, Forget, Generate, Load, Release, Unload
from tinker.protocol.values import (
    BlobRef,
    EpisodeId,
    PolicyVersion,
    RunId,
    SeatName,
    TurnId,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from tinker.runtime.actor import Actor

Post = Callable[[Any], None]
Fetch = Callable[[BlobRef], Awaitable[Files]]
RolloutMessage = Generate | Cancel | Forget | Load | Unload | Release


class RolloutWorker(Actor[RolloutMessage, None]):
    """One worker. `post` sends to the coordinator, `fetch` reads bundles of the data plane, `tasks` outlives the worker."""

    def __init__(self, capacity: int, engine: Engine, post: Post, fetch: Fetch, tasks: TaskGroup) -> None:
        self._slots = anyio.Semaphore(capacity)
        self._engine = engine
        self._post = post
        self._fetch = fetch
        self._tasks = tasks
        self._running: dict[tuple[TurnId, SeatName], anyio.CancelScope] = {}
        self._loaded: dict[RunId, set[PolicyVersion]] = {}
        self._loading: dict[PolicyVersion, anyio.Event] = {}  # set when the newest load of this version has ended

    async def receive(self, message: RolloutMessage) -> None:
        match message:
            case Generate():
                await self._slots.acquire()
                self._tasks.start_soon(self._answer, message, name=f"generate {message.turn.episode} {message.seat}")
            case Cancel():
                running = self._running.pop((message.turn, message.seat), None)
                if running is not None:
                    running.cancel()
            case Forget():
                await self._engine.forget(cache_prefix(message.run, message.episode))
            case Load():  # it may come from far away: answers go on meanwhile
                before, self._loading[message.version] = self._loading.get(message.version), anyio.Event()
                self._loaded.setdefault(message.run, set()).add(message.version)
                done = self._loading[message.version]
                self._tasks.start_soon(self._load, message, before, done, name=f"load {message.version}")
            case Unload():
                self._loaded.get(message.run, set()).discard(message.version)
                await self._unload(message.version)
            case Release():
                await self._engine.forget(f"{message.run}/")
                for version in sorted(self._loaded.pop(message.run, set())):
                    await self._unload(version)

    async def stopped(self) -> None:
        for scope in self._running.values():
            scope.cancel()

    async def _answer(self, message: Generate) -> None:
        key = (message.turn, message.seat)
        try:
            with anyio.move_on_after(message.deadline) as scope:
                self._running[key] = scope
                self._post(await self._generated(message))
            if scope.cancelled_caught and key in self._running:  # not by `Cancel`: somebody may still wait
                why = "the worker was stopped, or the deadline passed, before it answered"
                self._post(GenerateFailed(message.turn, message.seat, message.worker, why))
        finally:
            self._running.pop(key, None)
            self._slots.release()

    async def _generated(self, message: Generate) -> Generated | GenerateFailed:
        where = (message.turn, message.seat, message.worker)
        prefix = cache_prefix(message.turn.run, message.turn.episode)
        request = GenerateRequest(
            f"{prefix}{message.seat}", message.policy, unpack_ids(message.prompt), message.sampling
        )
        try:
            answer = await self._engine.generate(request)
        except EngineError as error:
            return GenerateFailed(*where, str(error))
        except Exception as error:  # the engine's fault; the coordinator gives the request to somebody else
            return GenerateFailed(*where, f"{type(error).__name__}: {error}")
        return Generated(
            *where,
            pack_ids(answer.ids),
            pack_floats(answer.logprobs),
            answer.finish,
            answer.version,
            answer.busy,
            self._engine.busy_seconds,
        )

    async def _unload(self, version: PolicyVersion) -> None:
        if version in self._loading:
            await self._loading[version].wait()
        await self._engine.unload(version)

    async def _load(self, message: Load, before: anyio.Event | None, done: anyio.Event) -> None:
        if before is not None:
            await before.wait()
        try:
            await self._engine.load(message.version, await self._fetch(message.adapter))
        except Exception as error:
            self._post(LoadFailed(message.run, message.worker, message.version, f"{type(error).__name__}: {error}"))
        else:
            self._post(Loaded(message.run, message.worker, message.version, message.adapter.digest))
        finally:
            done.set()
            if self._loading.get(message.version) is done:
                del self._loading[message.version]


def cache_prefix(run: RunId, episode: EpisodeId) -> str:
    """What the cache keys of all seats of one episode begin with."""
    return f"{run}/{episode}/"
