"""The transport inside one process: no sockets, no timers, the same promises. What simulations and most tests run on."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count

from tinker.runtime.transport.inbox import Inbox
from tinker.runtime.transport.interface import (
    BURST,
    DEFAULT_LIMITS,
    TOO_LARGE,
    AddressInUse,
    Arrival,
    Closed,
    Disconnected,
    Limits,
    PeerGone,
    PeerKey,
    PeerSlow,
    Unfit,
)
from tinker.runtime.transport.security import (
    PublicKey,
    Security,
    Unauthorized,
    not_admitted,
    not_reached,
    pin_for,
    pinned,
    unpinned,
)


class MemoryNetwork:
    """Names instead of addresses. A frame waits at its sender's end, in order, until the listener takes it."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._connections: dict[str, dict[PeerKey, MemoryConnection]] = {}
        self._numbers = count()

    def secured(self, security: Security) -> SecuredMemory:
        """The same network for a process that holds keys: as on a real one, but nothing is encrypted."""
        return SecuredMemory(self, security)

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS, security: Security | None = None) -> MemoryListener:
        bare, _ = unpinned(address)
        if bare in self._listeners:
            raise AddressInUse(
                f"{address} is already in use in this process: close the other listener or take another name"
            )
        listener = MemoryListener(self, bare, limits, security)
        self._listeners[bare] = listener
        for connection in list(self._connections.get(bare, {}).values()):
            if listener.lets_in(connection):
                listener.announce(connection, len(connection.waiting))
        return listener

    def connect(
        self, address: str, limits: Limits = DEFAULT_LIMITS, security: Security | None = None
    ) -> MemoryConnection:
        bare, server = pin_for(address, security)
        key = PeerKey(b"memory-%d" % next(self._numbers))
        connection = MemoryConnection(self, bare, key, limits, security, server)
        self._connections.setdefault(bare, {})[connection.key] = connection
        listener = self.listener(bare)
        if listener is not None:
            listener.lets_in(connection)
        return connection

    def listener(self, address: str) -> MemoryListener | None:
        return self._listeners.get(address)

    def connection(self, address: str, key: PeerKey) -> MemoryConnection | None:
        return self._connections.get(address, {}).get(key)

    def forget_listener(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.name) is listener:
            del self._listeners[listener.name]

    def connections(self, address: str) -> list[MemoryConnection]:
        return list(self._connections.get(address, {}).values())

    def forget_connection(self, connection: MemoryConnection) -> None:
        peers = self._connections.get(connection.address, {})
        peers.pop(connection.key, None)
        if not peers:
            self._connections.pop(connection.address, None)


class SecuredMemory:
    """One process's view of a memory network: its listeners have its guard, its connections its keys."""

    def __init__(self, network: MemoryNetwork, security: Security) -> None:
        self._network = network
        self._security = security

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS) -> MemoryListener:
        return self._network.listen(address, limits, self._security)

    def connect(self, address: str, limits: Limits = DEFAULT_LIMITS) -> MemoryConnection:
        return self._network.connect(address, limits, self._security)


class MemoryListener:
    """See `Listener`. Arrivals of all peers come in the order in which they were sent. `name`: its address without a key."""

    def __init__(self, network: MemoryNetwork, name: str, limits: Limits, security: Security | None = None) -> None:
        self.name = name
        self.refused: Counter[str] = Counter()
        self._guard = security.guard if security is not None else None
        self._keys = security.keys if security is not None and self._guard is not None else None
        self._identities: dict[PeerKey, str] = {}
        self.address = pinned(name, self._keys.public) if self._keys is not None else name
        self.undeliverable = 0
        self._network = network
        self._limits = limits
        self._closed = False
        self._ready: deque[MemoryConnection] = deque()  # one entry per waiting frame
        self._inbox: Inbox[Arrival] = Inbox(f"the listener at {name}", self._refill)

    def waiting(self, peer: PeerKey) -> int:
        connection = self._network.connection(self.name, peer)
        return connection.unread if connection is not None else 0

    def identity(self, peer: PeerKey) -> str | None:
        return self._identities.get(peer)

    def recheck(self) -> None:
        for connection in self._network.connections(self.name) if self._guard is not None else ():
            if connection.key in self._identities and not self.lets_in(connection):
                self._ready.append(connection)  # its end
                self._inbox.wake()

    def lets_in(self, connection: MemoryConnection) -> bool:
        """The handshake: both ends must be content. Whom it fails for is told."""
        self._identities.pop(connection.key, None)
        public = connection.security.keys.public if connection.security is not None else None
        if connection.server != (self._keys.public if self._keys is not None else None):
            self.refused["no handshake of ours"] += 1
            connection.refuse(
                Unauthorized(f"{self.name} does not speak as we do: it is protected by keys, or no OpenTinker")
                if connection.server is None
                else not_reached(self.name, connection.server)
            )
            return False
        if self._guard is None:
            return True
        identity = self._guard.admit(public) if public is not None else None
        if identity is None:
            self.refused["unknown key"] += 1
            assert connection.security is not None  # it has named a key, so it has one
            connection.refuse(not_admitted(self.name, connection.security.keys))
            return False
        self._identities[connection.key] = identity
        return True

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
        connection = self._network.connection(self.name, peer)
        if connection is None:
            raise PeerGone(f"no peer {peer!r} is connected to {self.address}")
        connection.deliver(data)

    def send_many(self, peer: PeerKey, frames: Sequence[bytes]) -> int:
        for data in frames:
            self._limits.check(data)
        for taken, data in enumerate(frames):
            try:
                self.send(peer, data)
            except PeerSlow:
                return taken
        return len(frames)

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
            if len(data) > self._limits.frame:  # as on a network: it is refused, and the connection breaks
                self._inbox.arrived.append(Unfit(connection.key, TOO_LARGE, self._limits.too_large(len(data))))
                self._inbox.arrived.append(Disconnected(connection.key))
            else:
                self._inbox.arrived.append((connection.key, data))


class MemoryConnection:
    """See `Connection`."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        key: PeerKey,
        limits: Limits,
        security: Security | None = None,
        server: PublicKey | None = None,
    ) -> None:
        self.address = address
        self.key = key
        self.security = security
        self.server = server
        self.waiting: deque[bytes] = deque()
        self._network = network
        self._limits = limits
        self._closed = False
        self._refused = False
        self._pending: deque[bytes] = deque()
        self._emptied: asyncio.Event | None = None
        self._inbox: Inbox[bytes] = Inbox(f"the connection to {address}", self._refill)

    @property
    def unread(self) -> int:
        """Frames from the listener that nobody has read."""
        return len(self._pending)

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
        if self._refused:
            return
        listener = self._network.listener(self.address)
        if listener is not None:
            listener.announce(self)

    def deliver(self, data: bytes) -> None:
        """From the listener."""
        if len(self._pending) >= self._limits.queue:
            raise PeerSlow(f"{len(self._pending)} frames wait for peer {self.key!r}: it does not read")
        self._pending.append(data)
        self._inbox.wake()

    def refuse(self, why: Unauthorized) -> None:
        """From the listener, which hears nothing from here any more."""
        self.waiting.clear()
        self._network.forget_connection(self)
        self._refused = True
        self._inbox.close(why)

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
        listener = None if self._refused else self._network.listener(self.address)
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
