"""The coordinator daemon: the pure core behind a socket.

One task reads bursts of messages, steps the core and sends what it says; one task tells it that time has passed. Nothing else touches the
core. A message that is no message, or comes from somebody who is no member, is refused, counted, and never crashes anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog

from coordinator.core.coordinator import Coordinator, MemberRefused
from coordinator.core.run import Sends
from tinker.protocol import ToCoordinator
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import Bye, Heartbeat, Hello
from tinker.protocol.to_host import CoordinatorLoad, Opened, Queued
from tinker.protocol.values import PeerName
from tinker.runtime.clock import Clock
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.transport import Arrival, Disconnected, Listener, PeerGone, PeerKey, PeerSlow

TICK = 0.25  # seconds between looks at deadlines and leases
LATE = 2.0  # a tick later than this says that we slept: hear everybody out before a lease may end
GRACE = 3.0  # seconds for the last messages when stopping

log = structlog.get_logger("coordinator")


@dataclass(slots=True)
class Daemon:
    """Serves one core on one listener until `stop` is called or its task is cancelled."""

    core: Coordinator
    listener: Listener
    clock: Clock
    cpu: Callable[[], float] = time.process_time
    names: dict[PeerKey, PeerName] = field(default_factory=dict)
    keys: dict[PeerName, PeerKey] = field(default_factory=dict)
    messages: int = 0
    _cpu_before: float = 0.0
    _stopping: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self) -> None:
        self._cpu_before = self.cpu()
        log.info("listening", address=self.listener.address, epoch=self.core.epoch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, name="read")
            tasks.start_soon(self._watch, name="watch deadlines")
            await self._stopping.wait()
            for key in self.keys.values():
                self._send_to(key, Draining("the coordinator is stopping"))
            tasks.cancel_scope.cancel()
        await self.listener.aclose(GRACE)
        log.info("stopped", **{name.replace(" ", "_"): count for name, count in sorted(self.core.counts.items())})

    def stop(self) -> None:
        self._stopping.set()

    async def _read(self) -> None:
        while True:
            for arrival in await self.listener.receive_many():
                self._arrived(arrival)

    async def _watch(self) -> None:
        due = self.clock.now() + TICK
        while True:
            await self.clock.sleep_until(due)
            now = self.clock.now()
            if now - due < LATE:
                self._send(self.core.tick(now))
                self._fence()
            due = now + TICK

    def _fence(self) -> None:
        """Whoever the core gave up is a stranger from now on, even if it wakes up again."""
        for name in [name for name in self.keys if name not in self.core.roster.peers]:
            log.warning("lost", peer=name, why="its lease ended")
            del self.names[self.keys.pop(name)]

    def _arrived(self, arrival: Arrival) -> None:
        now = self.clock.now()
        if isinstance(arrival, Disconnected):
            name = self.names.pop(arrival.peer, None)
            if name is not None:
                del self.keys[name]
                log.warning("lost", peer=name, why="its connection was closed")
                self._send(self.core.lose(name, "its connection was closed", now))
            return
        key, data = arrival
        self.messages += 1
        try:
            message = decode(data, ToCoordinator)
        except WireError as error:
            self._refuse(key, "frame", str(error))
            return
        name = self.names.get(key)
        if name is not None:
            self._step(name, message, now)
        elif isinstance(message, Hello):
            self._join(key, message, now)
        else:
            self._refuse(key, type(message).__name__, "you are no member; say Hello first")

    def _step(self, name: PeerName, message: ToCoordinator, now: float) -> None:
        if isinstance(message, Heartbeat):
            self._send([(name, Welcome(self.core.name, self.core.epoch, self.core.lease))])
        self._send(self.core.step(name, message, now))
        if isinstance(message, Bye):
            log.info("left", peer=name, why=message.reason)
            self.names.pop(self.keys.pop(name), None)

    def _join(self, key: PeerKey, hello: Hello, now: float) -> None:
        try:
            sends = self.core.join(hello, now)
        except MemberRefused as error:
            self._refuse(key, "Hello", str(error))
            return
        self.names[key] = hello.name
        self.keys[hello.name] = key
        log.info("joined", peer=hello.name, role=str(hello.role), pid=hello.pid, workers=len(hello.workers))
        self._send(sends)

    def _refuse(self, key: PeerKey, what: str, reason: str) -> None:
        self.core.counts[f"refused {what}"] += 1
        log.warning("refused", what=what, peer=self.names.get(key, "unknown"), reason=reason)
        self._send_to(key, Refused(what, reason))

    def _send(self, sends: Sends) -> None:
        for name, message in sends:
            key = self.keys.get(name)
            if key is None:
                self.core.counts["undeliverable"] += 1
                continue
            self._tell(name, message)
            self._send_to(key, message)

    def _send_to(self, key: PeerKey, message: object) -> None:
        try:
            self.listener.send(key, encode(message))
            if isinstance(message, Opened):
                load = CoordinatorLoad(self.cpu() - self._cpu_before, self.core.counts["turns"], self.messages)
                self.listener.send(key, encode(load))
        except (PeerGone, PeerSlow, WireError) as error:
            self.core.counts["undeliverable"] += 1
            log.warning(
                "undeliverable", peer=self.names.get(key, "unknown"), message=type(message).__name__, why=str(error)
            )

    def _tell(self, name: PeerName, message: object) -> None:
        match message:
            case Opened():
                log.info(
                    "barrier opened",
                    run=message.run,
                    round=message.round,
                    phase=str(message.phase),
                    edge=str(message.edge),
                )
            case Refused():
                log.warning("refused", peer=name, what=message.what, reason=message.reason)
            case Queued():
                log.info("queued", run=message.run, reason=message.reason)
