"""The life of one replica: start it or find it, bring it up, watch it, and when it falls out of routing bring it up again.

A server of ours that dies is started again, a few times an hour; one that somebody else runs is waited for as long as it takes. Whatever
ails it is said once per change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import structlog

from tinker.engines.sglang.adapters import tidy
from tinker.engines.sglang.api import ServerFault, Unavailable
from tinker.engines.sglang.joining import bring_up
from tinker.engines.sglang.registry import Registry
from tinker.engines.sglang.replica import Replica, State
from tinker.engines.sglang.server import Server

HOUR = 3600.0
FIRST, LONGEST = 0.1, 5.0  # seconds between two attempts to bring a server up
LOOKS = 5  # every so many looks the server must answer a request of its own
log = structlog.get_logger("sglang")


class Process(Protocol):
    """A server that can be started; `url` is where it listens then."""

    @property
    def url(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    async def start(self) -> None: ...

    async def exited(self) -> None:
        """Until it has ended."""

    async def stop(self) -> None: ...

    def story(self) -> str:
        """How it ended, and its last words."""


@dataclass(slots=True, eq=False)
class Keeper:
    """`ready`: seconds a server may take until it answers. `restarts`: how often within an hour ours is started again. `settled` is set
    when it serves for the first time, or has failed to (`failure`)."""

    registry: Registry
    replica: Replica
    url: str = ""
    process: Process | None = None
    ready: float = 120.0
    restarts: int = 3
    probe: tuple[Sequence[int], Sequence[float]] | None = None
    settled: anyio.Event = field(default_factory=anyio.Event)
    failure: str = ""
    _deaths: deque[float] = field(default_factory=deque)

    async def keep(self) -> None:
        """Until cancelled, or its restarts are spent."""
        wait = FIRST
        while self.replica.state is not State.GONE:
            try:
                await self._connect()
                await self._until_ready()
                await bring_up(self.registry, self.replica, self.probe)
            except ServerFault as fault:
                self._failed(str(fault))
                await self._pause(wait)
                wait = min(2 * wait, LONGEST)
            else:
                wait = FIRST
                self.settled.set()
                await self._watch()
            if self.process is not None and not self.process.alive:
                self._died(self.process)

    async def close(self) -> None:
        """Let go of the server; stop it if it is ours. Not while it is kept."""
        with anyio.CancelScope(shield=True):
            if self.replica.server is not None:
                await self.replica.server.aclose()
            if self.process is not None:
                await self.process.stop()

    async def _connect(self) -> None:
        url = self.url
        if self.process is not None:
            if not self.process.alive:
                await self.process.start()
            url = self.process.url
        if self.replica.server is None or self.replica.server.url != url:
            if self.replica.server is not None:
                await self.replica.server.aclose()
            self.replica.server = Server(url, self.registry.settings.keys)

    async def _until_ready(self) -> None:
        with anyio.move_on_after(self.ready):
            while not await self.replica.address.ready():
                if self.process is not None and not self.process.alive:
                    raise Unavailable(self.process.story())
                await self._pause(0.25)
            return
        raise Unavailable(f"{self.replica.name} was not ready after {self.ready:g} s")

    def _failed(self, why: str) -> None:
        if why != self.replica.reason:
            log.warning("replica not up", replica=self.replica.name, reason=why)
        self.replica.reason = why
        if not self.settled.is_set():
            self.failure = why
            self.settled.set()

    async def _pause(self, seconds: float) -> None:
        """Or until our process has ended."""
        with anyio.move_on_after(seconds):
            if self.process is not None and self.process.alive:
                await self.process.exited()
            else:
                await anyio.sleep(seconds)

    async def _watch(self) -> None:
        """Until it is out of routing, whoever took it out."""
        replica, misses, looks = self.replica, 0, 0
        while replica.state is not State.FENCED:
            await self._wait_a_moment()
            if self.process is not None and not self.process.alive:
                self._lose(self.process.story())
                return
            if replica.state is not State.SERVING:  # it is given new weights, and is busy
                continue
            looks += 1
            try:
                told = await replica.address.label()
                if looks % LOOKS == 0 and replica.state is State.SERVING and not await replica.address.ready():
                    raise Unavailable(f"{replica.name} answers no request of its own")
            except ServerFault as fault:
                misses += 1
                if misses >= self.registry.settings.misses:
                    self._lose(str(fault))
                continue
            misses = 0
            if told != replica.label and replica.state is State.SERVING:
                self._lose(f"it calls its weights {told!r}, expected {replica.label!r}: was it started again?")
            await tidy(replica)

    async def _wait_a_moment(self) -> None:
        """A look is due, or it was fenced, or our process has ended."""
        with anyio.move_on_after(self.registry.settings.watch):
            async with anyio.create_task_group() as tasks:

                async def ended() -> None:
                    if self.process is not None:
                        await self.process.exited()
                        tasks.cancel_scope.cancel()

                tasks.start_soon(ended)
                await self.replica.fenced.wait()
                tasks.cancel_scope.cancel()

    def _lose(self, why: str) -> None:
        """It is out, and nobody waits for its answers."""
        self.registry.fleet.fence(self.replica, why)
        self.replica.lost()

    def _died(self, process: Process) -> None:
        """Its weights and adapters went with it; is it worth another start?"""
        now = anyio.current_time()
        self.replica.held.clear()
        self.replica.leftover.clear()
        self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - HOUR:
            self._deaths.popleft()
        log.error("server died", replica=self.replica.name, deaths=len(self._deaths), story=process.story())
        if len(self._deaths) > self.restarts:
            self.replica.state = State.GONE
            self.replica.reason = f"it died {len(self._deaths)} times within an hour, the last time: {process.story()}"
            self.replica.lost()
        self.registry.fleet.tell()
