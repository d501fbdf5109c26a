"""The transport between processes: one ZeroMQ ROUTER that listens, one DEALER per connection."""

from __future__ import annotations

import errno
import secrets
import socket
from collections import deque

import zmq

from tinker.runtime.transport.inbox import Inbox
from tinker.runtime.transport.interface import (
    BURST,
    DEFAULT_LIMITS,
    AddressInUse,
    Arrival,
    Disconnected,
    Limits,
    PeerGone,
    PeerKey,
    PeerSlow,
    TransportError,
)
from tinker.runtime.transport.zmq_socket import OwnedSocket


class ZmqTransport:
    """Listens and connects at `tcp://HOST:PORT` (port 0: any free one) and `ipc://PATH`."""

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS) -> ZmqListener:
        return ZmqListener(address, limits)

    def connect(self, address: str, limits: Limits = DEFAULT_LIMITS) -> ZmqConnection:
        return ZmqConnection(address, limits)


class ZmqListener:
    """See `Listener`."""

    def __init__(self, address: str, limits: Limits) -> None:
        _refuse_taken_path(address)
        self.undeliverable = 0
        self._limits = limits
        self._backlogs: dict[PeerKey, deque[bytes]] = {}  # frames ZeroMQ had no room for
        self._descriptor_of: dict[PeerKey, int] = {}
        self._peer_at: dict[int, PeerKey] = {}
        self._broken: set[int] = set()  # descriptors whose last connection has ended
        self._lost: dict[PeerKey, None] = {}  # a set that keeps the order
        self._socket = OwnedSocket(zmq.ROUTER, limits, self._look)
        for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.BACKLOG, 4096)):
            self._socket.raw.set(option, value)
        self._socket.watch(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, self._hear_monitor)
        try:
            self._socket.raw.bind(address)
        except zmq.ZMQError as error:
            self._socket.abandon()
            raise _bind_error(address, error) from error
        self.address = self._socket.raw.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._inbox: Inbox[Arrival] = Inbox(f"the listener at {self.address}", self._refill)
        self._socket.start()

    async def receive(self) -> Arrival:
        return await self._inbox.one()

    async def receive_many(self) -> list[Arrival]:
        return await self._inbox.many()

    def send(self, peer: PeerKey, data: bytes) -> None:
        self._socket.guard()
        self._limits.check(data)
        backlog = self._backlogs.get(peer)
        if backlog is None:
            # ZeroMQ forgets a peer a little after it has told us, and until then takes frames that go nowhere
            taken = self._hand_over(peer, data) if peer in self._descriptor_of else None
            if taken is None:
                raise PeerGone(f"no peer {peer.hex()} is connected to {self.address}")
            if not taken:
                self._backlogs[peer] = deque([data])
        elif len(backlog) < self._limits.queue:
            backlog.append(data)
        else:
            raise PeerSlow(f"{len(backlog)} frames wait for peer {peer.hex()} at {self.address}: it does not read")
        if self._inbox.wanted:
            self._socket.look_again()

    async def aclose(self, grace: float = 0.0) -> int:
        if self._socket.closed:
            return 0
        self._inbox.close()
        await self._socket.aclose(self._flush, grace)
        return sum(map(len, self._backlogs.values()))

    def _hand_over(self, peer: PeerKey, data: bytes) -> bool | None:
        """True: ZeroMQ took it; False: no room; None: no such peer."""
        raw = self._socket.raw
        try:
            raw.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            raw.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return None
            raise TransportError(f"cannot send from {self.address}: {error}") from error
        return True

    def _flush(self) -> bool:
        """Hand over what waits; whether nothing is left."""
        for peer in list(self._backlogs):
            backlog = self._backlogs[peer]
            while backlog:
                taken = self._hand_over(peer, backlog[0])
                if taken is None:
                    self._lost[peer] = None
                    break
                if not taken:
                    break
                backlog.popleft()
            if not backlog:
                del self._backlogs[peer]
        return not self._backlogs

    def _look(self) -> None:
        if self._backlogs:
            self._flush()
        if self._socket.readable or self._lost:
            self._inbox.wake()

    def _refill(self) -> None:
        self._socket.guard()
        lost, self._lost = self._lost, {}  # noted before we read: what these peers sent comes first
        receive, arrived = self._socket.raw.recv, self._inbox.arrived
        for _ in range(BURST):
            try:
                peer = PeerKey(receive(zmq.NOBLOCK))
            except zmq.Again:
                for gone in lost:
                    self._report_lost(gone)
                return
            frame = receive(zmq.NOBLOCK, copy=False)
            if peer not in self._descriptor_of:
                self._meet(peer, frame)
            arrived.append(
                (peer, b"" if frame.more else frame.bytes)
            )  # several parts are no frame of ours: nothing we decode is empty
            while frame.more:
                frame = receive(zmq.NOBLOCK, copy=False)
        self._lost = lost | self._lost

    def _meet(self, peer: PeerKey, frame: zmq.Frame) -> None:
        """Remember which descriptor the peer is on. It may have gone already, and descriptors are re-used."""
        self._read_monitor()
        descriptor = int(frame.get(zmq.SRCFD))
        before = self._peer_at.get(descriptor)
        if before is not None:
            self._lost[before] = None
        self._descriptor_of[peer] = descriptor
        self._peer_at[descriptor] = peer
        if descriptor in self._broken:
            self._lost[peer] = None

    def _hear_monitor(self) -> None:
        self._read_monitor()
        if self._lost:
            self._inbox.wake()

    def _read_monitor(self) -> None:
        for event, descriptor in self._socket.monitored():
            if event == zmq.EVENT_ACCEPTED:
                self._broken.discard(descriptor)
                continue
            self._broken.add(descriptor)
            peer = self._peer_at.pop(descriptor, None)
            if peer is not None:
                self._lost[peer] = None

    def _report_lost(self, peer: PeerKey) -> None:
        descriptor = self._descriptor_of.pop(peer, None)
        if descriptor is not None and self._peer_at.get(descriptor) == peer:
            del self._peer_at[descriptor]
        unsent = len(self._backlogs.pop(peer, ()))
        self.undeliverable += unsent
        if descriptor is not None or unsent:
            self._inbox.arrived.append(Disconnected(peer))


class ZmqConnection:
    """See `Connection`."""

    def __init__(self, address: str, limits: Limits) -> None:
        self.address = address
        self._limits = limits
        self._backlog: deque[bytes] = deque()
        self._connected = False
        self._socket = OwnedSocket(zmq.DEALER, limits, self._look)
        self._inbox: Inbox[bytes] = Inbox(f"the connection to {address}", self._refill)
        self._socket.raw.set(zmq.IDENTITY, b"\x01" + secrets.token_bytes(15))
        self._socket.watch(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED, self._hear_monitor)
        try:
            self._socket.raw.connect(address)
        except zmq.ZMQError as error:
            self._socket.abandon()
            raise TransportError(
                f"cannot connect to {address!r}: {error}; expected something like tcp://127.0.0.1:7777"
            ) from error
        self._socket.start()

    async def receive(self) -> bytes:
        return await self._inbox.one()

    async def receive_many(self) -> list[bytes]:
        return await self._inbox.many()

    def send(self, data: bytes) -> None:
        self._socket.guard()
        self._limits.check(data)
        if self._backlog or not self._hand_over(data):
            if len(self._backlog) >= self._limits.queue:
                raise PeerSlow(
                    f"{len(self._backlog)} frames wait for {self.address}: it does not read, or nobody listens there"
                )
            self._backlog.append(data)
        if self._inbox.wanted:
            self._socket.look_again()

    async def aclose(self, grace: float = 0.0) -> int:
        if self._socket.closed:
            return 0
        self._inbox.close()
        await self._socket.aclose(self._flush, grace)
        return len(self._backlog)

    def _hand_over(self, data: bytes) -> bool:
        if not self._connected:
            return False
        try:
            self._socket.raw.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _hear_monitor(self) -> None:
        for event, _ in self._socket.monitored():
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._look()

    def _flush(self) -> bool:
        while self._backlog and self._hand_over(self._backlog[0]):
            self._backlog.popleft()
        return not self._backlog

    def _look(self) -> None:
        if self._backlog:
            self._flush()
        if self._socket.readable:
            self._inbox.wake()

    def _refill(self) -> None:
        self._socket.guard()
        receive, arrived = self._socket.raw.recv, self._inbox.arrived
        for _ in range(BURST):
            try:
                arrived.append(receive(zmq.NOBLOCK))
            except zmq.Again:
                return


def _bind_error(address: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(address)
    return TransportError(f"cannot listen at {address!r}: {error}; expected something like tcp://127.0.0.1:0")


def _in_use(address: str) -> AddressInUse:
    return AddressInUse(
        f"{address} is already in use: stop the process that listens there, or choose another port "
        "(port 0, as in tcp://127.0.0.1:0, takes any free one)"
    )


def _refuse_taken_path(address: str) -> None:
    """ZeroMQ would take an ipc path away from whoever listens there."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise _in_use(address)
