"""The transport between processes: one ZeroMQ ROUTER that listens, one DEALER per connection.

Why the sockets are driven like this (each was seen to go wrong otherwise): a ROUTER drops silently without MANDATORY and blocks for ever
on a blocking send, so every call is NOBLOCK and what does not fit waits in a queue of ours. The socket's descriptor is edge-triggered
and a send may swallow the edge, so one object owns the socket, reads until there is nothing, looks again after every send, and looks
every 250 ms in any case. Two peers of one identity starve each other, so identities are random. ZeroMQ cannot say what is left in its
own queue, so a connection hands frames over only while it is connected (its option IMMEDIATE would do that too, but throws away frames
that arrived and were not read yet when the connection breaks). A context per socket makes closing complete: when `aclose` returns, the
port and every descriptor are free.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterator

import anyio
import zmq

from tinker.runtime.transport.inbox import Inbox
from tinker.runtime.transport.interface import (
    BURST,
    DEFAULT_LIMITS,
    AddressInUse,
    Arrival,
    Closed,
    Disconnected,
    FrameTooLarge,
    Limits,
    PeerGone,
    PeerKey,
    PeerSlow,
    TransportError,
)

SAFETY_POLL = 0.25  # seconds
HIGH_WATER = 1000  # frames ZeroMQ itself holds per peer and direction
RECONNECT_MS = (50, 2000)  # first and longest pause between attempts to connect


class ZmqTransport:
    """Listens and connects at `tcp://HOST:PORT` (port 0: any free one) and `ipc://PATH`."""

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS) -> ZmqListener:
        return ZmqListener(address, limits)

    def connect(self, address: str, limits: Limits = DEFAULT_LIMITS) -> ZmqConnection:
        return ZmqConnection(address, limits)


class _Socket:
    """The owner of one ZeroMQ socket: options, readiness, the pid guard, and an orderly end. `look` is called when something may have
    changed: it must read `events` (that re-arms the descriptor), flush, and wake the receiver."""

    def __init__(self, kind: int, limits: Limits, look: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self.raw: zmq.Socket[bytes] = self._context.socket(kind)
        self._look = look
        self._pid = os.getpid()
        self._looking = False
        self._progress = asyncio.Event()
        self._monitor: zmq.Socket[bytes] | None = None
        self.closed = False
        beat = max(1, int(limits.heartbeat * 1000))
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, limits.frame),
            (zmq.HEARTBEAT_IVL, beat),
            (zmq.HEARTBEAT_TIMEOUT, 3 * beat),
            (zmq.HEARTBEAT_TTL, 3 * beat),
            (zmq.RECONNECT_IVL, RECONNECT_MS[0]),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1]),
        ):
            self.raw.set(option, value)

    def start(self) -> None:
        """Watch the descriptor from now on."""
        self._loop.add_reader(self.raw.fileno(), self._ready)
        self._timer = self._loop.call_later(SAFETY_POLL, self._poll)

    def watch(self, events: int, heard: Callable[[], None]) -> None:
        """Call `heard` when `monitored` has something to say."""
        self._monitor = self.raw.get_monitor_socket(events)
        list(self.monitored())  # a socket that was never read from does not signal
        self._loop.add_reader(self._monitor.fileno(), heard)
        self._heard = heard

    def monitored(self) -> Iterator[tuple[int, int]]:
        """What the monitor has seen since the last call: (event, descriptor)."""
        assert self._monitor is not None
        while True:
            try:
                event = self._monitor.recv(zmq.NOBLOCK)
                self._monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield struct.unpack("=HI", event)

    def look_again(self) -> None:
        """After a send, which may have swallowed the edge."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look_once)

    def guard(self) -> None:
        if self.closed:
            raise Closed("this end is closed")
        if os.getpid() != self._pid:
            raise TransportError(
                f"this socket belongs to process {self._pid}: open your own after a fork, or start processes by spawn"
            )

    @property
    def readable(self) -> bool:
        return bool(int(self.raw.get(zmq.EVENTS)) & zmq.POLLIN)

    def abandon(self) -> None:
        """It was never started."""
        self._unwatch()
        self.closed = True
        self._context.destroy(linger=0)

    async def aclose(self, flush: Callable[[], bool], grace: float) -> None:
        """Flush while there is grace, then release everything. Waits at most `grace` (the rest of it is ZeroMQ's linger)."""
        deadline = self._loop.time() + grace
        try:
            with anyio.move_on_after(grace):
                while not flush():
                    self._progress.clear()
                    await self._progress.wait()
        finally:
            left = max(0.0, deadline - self._loop.time())
            self._release(int(left * 1000))
            with anyio.CancelScope(shield=True):  # bounded by the linger
                await anyio.to_thread.run_sync(self._context.term)

    def _release(self, linger_ms: int) -> None:
        self.closed = True
        self._timer.cancel()
        self._loop.remove_reader(self.raw.fileno())
        self._unwatch()
        self.raw.close(linger_ms)

    def _unwatch(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self.raw.disable_monitor()
            self._monitor.close(0)

    def _ready(self) -> None:
        self._look()
        self._progress.set()

    def _look_once(self) -> None:
        self._looking = False
        if not self.closed:
            self._ready()

    def _poll(self) -> None:
        self._timer = self._loop.call_later(SAFETY_POLL, self._poll)
        self._heard()
        self._ready()


class ZmqListener:
    """See `Listener`."""

    def __init__(self, address: str, limits: Limits) -> None:
        self.undeliverable = 0
        self._limits = limits
        self._backlogs: dict[PeerKey, deque[bytes]] = {}  # frames ZeroMQ had no room for
        self._descriptor_of: dict[PeerKey, int] = {}
        self._peer_at: dict[int, PeerKey] = {}
        self._lost: dict[PeerKey, None] = {}  # a set that keeps the order
        self._socket = _Socket(zmq.ROUTER, limits, self._look)
        for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.BACKLOG, 4096)):
            self._socket.raw.set(option, value)
        self._socket.watch(zmq.EVENT_DISCONNECTED, self._hear_monitor)
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
        _check_size(data, self._limits)
        backlog = self._backlogs.get(peer)
        if backlog is None:
            taken = self._hand_over(peer, data)
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
        """Remember which descriptor the peer is on. They are re-used, so earlier disconnects must be heard first."""
        self._read_monitor()
        descriptor = int(frame.get(zmq.SRCFD))
        self._descriptor_of[peer] = descriptor
        self._peer_at[descriptor] = peer

    def _hear_monitor(self) -> None:
        self._read_monitor()
        if self._lost:
            self._inbox.wake()

    def _read_monitor(self) -> None:
        for _, descriptor in self._socket.monitored():
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
        self._socket = _Socket(zmq.DEALER, limits, self._look)
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
        _check_size(data, self._limits)
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
        return AddressInUse(
            f"{address} is already in use: stop the process that listens there, or choose another port "
            "(port 0, as in tcp://127.0.0.1:0, takes any free one)"
        )
    return TransportError(f"cannot listen at {address!r}: {error}; expected something like tcp://127.0.0.1:0")


def _check_size(data: bytes, limits: Limits) -> None:
    if len(data) > limits.frame:
        raise FrameTooLarge(f"a frame of {len(data)} bytes; at most {limits.frame} fit")
