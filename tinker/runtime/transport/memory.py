"""The transport inside one process: no sockets, no timers, the same promises. What simulations and most tests run on."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count

from tinker.runtime.transport.inbox import Inbox
from tinker.runtime.transport.interface import (
    BURST,
    DEFAULT_LIMITS,
    AddressInUse,
    Arrival,
    Closed,
    Disconnected,
    Limits,
    PeerGone,
    PeerKey,
    PeerSlow,
)


class MemoryNetwork:
    """Names instead of addresses. A frame waits at its sender's end, in order, until the listener takes it."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._connections: dict[str, dict[PeerKey, MemoryConnection]] = {}
        self._numbers = count()

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS) -> MemoryListener:
        if address in self._listeners:
            raise AddressInUse(
                f"{address} is already in use in this process: close the other listener or take another name"
            )
        listener = MemoryListener(self, address, limits)
        self._listeners[address] = listener
        for connection in self._connections.get(address, {}).values():
            listener.announce(connection, len(connection.waiting))
        return listener

    def connect(self, address: str, limits: Limits = DEFAULT_LIMITS) -> MemoryConnection:
        connection = MemoryConnection(self, address, PeerKey(b"memory-%d" % next(self._numbers)), limits)
        self._connections.setdefault(address, {})[connection.key] = connection
        return connection

    def listener(self, address: str) -> MemoryListener | None:
        return self._listeners.get(address)

    def connection(self, address: str, key: PeerKey) -> MemoryConnection | None:
        return self._connections.get(address, {}).get(key)

    def forget_listener(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def forget_connection(self, connection: MemoryConnection) -> None:
        peers = self._connections.get(connection.address, {})
        peers.pop(connection.key, None)
        if not peers:
            self._connections.pop(connection.address, None)


class MemoryListener:
    """See `Listener`. Arrivals of all peers come in the order in which they were sent."""

    def __init__(self, network: MemoryNetwork, address: str, limits: Limits) -> None:
        self.address = address
        self.undeliverable = 0
        self._network = network
        self._limits = limits
        self._closed = False
        self._ready: deque[MemoryConnection] = deque()  # one entry per waiting frame
        self._inbox: Inbox[Arrival] = Inbox(f"the listener at {address}", self._refill)

    def announce(self, connection: MemoryConnection, frames: int = 1) -> None:
        """That many more frames (or its end) wait at this connection."""
        self._ready.extend([connection] * frames)
        self._inbox.wake()

    async def receive(self) -> Arrival:
        return await self._inbox.one()

    async def receive_many(self) -> list[Arrival]:
        return await self._inbox.many()

    def send(self, peer: PeerKey, data: bytes) -> None:
        if self._closed:
            raise Closed(f"the listener at {self.address} is closed")
        self._limits.check(data)
        connection = self._network.connection(self.address, peer)
        if connection is None:
            raise PeerGone(f"no peer {peer!r} is connected to {self.address}")
        connection.deliver(data)

    async def aclose(self, grace: float = 0.0) -> int:
        """`grace` is not needed: what was sent has arrived."""
        await asyncio.sleep(0)
        self._closed = True
        self._network.forget_listener(self)
        self._inbox.close()
        return 0

    def _refill(self) -> None:
        for _ in range(min(BURST, len(self._ready))):
            connection = self._ready.popleft()
            if not connection.waiting:
                self._inbox.arrived.append(Disconnected(connection.key))
                continue
            data = connection.waiting.popleft()
            connection.left()
            if (
                len(data) > self._limits.frame
            ):  # as on a network: the frame is refused and the connection breaks (and is made again)
                self._inbox.arrived.append(Disconnected(connection.key))
            else:
                self._inbox.arrived.append((connection.key, data))


class MemoryConnection:
    """See `Connection`."""

    def __init__(self, network: MemoryNetwork, address: str, key: PeerKey, limits: Limits) -> None:
        self.address = address
        self.key = key
        self.waiting: deque[bytes] = deque()
        self._network = network
        self._limits = limits
        self._closed = False
        self._pending: deque[bytes] = deque()
        self._emptied: asyncio.Event | None = None
        self._inbox: Inbox[bytes] = Inbox(f"the connection to {address}", self._refill)

    async def receive(self) -> bytes:
        return await self._inbox.one()

    async def receive_many(self) -> list[bytes]:
        return await self._inbox.many()

    def send(self, data: bytes) -> None:
        if self._closed:
            raise Closed(f"the connection to {self.address} is closed")
        self._limits.check(data)
        if len(self.waiting) >= self._limits.queue:
            raise PeerSlow(
                f"{len(self.waiting)} frames wait for {self.address}: it does not read, or nobody listens there"
            )
        self.waiting.append(data)
        listener = self._network.listener(self.address)
        if listener is not None:
            listener.announce(self)

    def deliver(self, data: bytes) -> None:
        """From the listener."""
        if len(self._pending) >= self._limits.queue:
            raise PeerSlow(f"{len(self._pending)} frames wait for peer {self.key!r}: it does not read")
        self._pending.append(data)
        self._inbox.wake()

    def left(self) -> None:
        """The listener took a frame."""
        if self._emptied is not None and not self.waiting:
            self._emptied.set()

    async def aclose(self, grace: float = 0.0) -> int:
        """What a present listener has not taken yet stays for it to take, as on a network; only without one frames are unsent."""
        if self._closed:
            return 0
        self._closed = True
        self._inbox.close()
        await self._drained(grace)
        self._network.forget_connection(self)
        listener = self._network.listener(self.address)
        if listener is None:
            return len(self.waiting)
        listener.announce(self)  # its end, after its frames
        return 0

    async def _drained(self, grace: float) -> None:
        """Wait at most `grace` seconds until somebody listens and has taken everything."""
        if not self.waiting or grace <= 0 or self._network.listener(self.address) is not None:
            await asyncio.sleep(0)
            return
        self._emptied = asyncio.Event()
        try:
            await asyncio.wait_for(self._emptied.wait(), grace)
        except TimeoutError:
            return

    def _refill(self) -> None:
        for _ in range(min(BURST, len(self._pending))):
            self._inbox.arrived.append(self._pending.popleft())
