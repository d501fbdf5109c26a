"""The transport between processes: one ZeroMQ ROUTER that listens, one DEALER per connection."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.backend import Socket as Bare

from tinker.runtime.transport.curve import protect_connection, protect_listener
from tinker.runtime.transport.inbox import Inbox
from tinker.runtime.transport.interface import (
    BEYOND,
    BURST,
    DEFAULT_LIMITS,
    TOO_LARGE,
    AddressInUse,
    Arrival,
    Disconnected,
    Limits,
    PeerGone,
    PeerKey,
    PeerSlow,
    TransportError,
    Unfit,
)
from tinker.runtime.transport.security import (
    Guard,
    GuardFailed,
    PublicKey,
    Security,
    Unauthorized,
    not_admitted,
    not_reached,
    pin_for,
    pinned,
    unpinned,
)
from tinker.runtime.transport.zmq_socket import MORE, NOW, OwnedSocket

_send = Bare.send  # what a socket's own `send` does last, and three times as quick

FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
PARTS, PARTS_BYTES = (
    64,
    64 * 1024,
)  # most that is handed to ZeroMQ as one message: of those it holds HIGH_WATER, whatever their size
PATIENCE = 5  # handshakes with a protected listener that are broken off one after the other before we say so


class ZmqTransport:
    """Listens and connects at `tcp://HOST:PORT` (port 0: any free one) and `ipc://PATH`. With `security` listeners that have a guard and
    connections to addresses that name a key are protected by CURVE."""

    def __init__(self, security: Security | None = None) -> None:
        self._security = security

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS) -> ZmqListener:
        return ZmqListener(address, limits, self._security)

    def connect(self, address: str, limits: Limits = DEFAULT_LIMITS) -> ZmqConnection:
        return ZmqConnection(address, limits, self._security)


class ZmqListener:
    """See `Listener`."""

    def __init__(self, address: str, limits: Limits, security: Security | None = None) -> None:
        bare, _ = unpinned(address)
        _refuse_taken_path(bare)
        self._guard: Guard | None = None
        self._known: dict[PeerKey, tuple[PublicKey, str]] = {}  # with a guard: who speaks, by key and by identity
        self._failed: Counter[str] = Counter()
        self._just_failed = False
        self._ended = False
        self.undeliverable = 0
        self._limits = limits
        self._backlogs: dict[PeerKey, deque[bytes]] = {}  # frames ZeroMQ had no room for
        self._descriptor_of: dict[PeerKey, int] = {}
        self._peer_at: dict[int, PeerKey] = {}
        self._broken: set[int] = set()  # descriptors whose last connection has ended
        self._lost: dict[PeerKey, None] = {}  # a set that keeps the order
        self._socket = OwnedSocket(zmq.ROUTER, limits, self._look)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.BACKLOG, 4096),
            (zmq.MAXMSGSIZE, limits.frame * BEYOND),
        ):
            self._socket.raw.set(option, value)
        if security is not None and security.guard is not None:
            self._guard = security.guard
            protect_listener(self._socket.raw, security.keys, limits.frame * BEYOND)
            self._socket.guarded(security.guard, self._guard_failed)
        self._socket.watch(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED, self._hear_monitor)
        try:
            self._socket.raw.bind(bare)
        except zmq.ZMQError as error:
            self._socket.abandon()
            raise _bind_error(address, error) from error
        self.address = self._socket.raw.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._path = _path_of(bare)
        self._file = _file_at(self._path)
        if security is not None and self._guard is not None:
            self.address = pinned(self.address, security.keys.public)
        self._inbox: Inbox[Arrival] = Inbox(f"the listener at {self.address}", self._refill)
        self._socket.start()

    async def receive(self) -> Arrival:
        return await self._inbox.one()

    async def receive_many(self) -> list[Arrival]:
        return await self._inbox.many()

    def send(self, peer: PeerKey, data: bytes) -> None:
        if not self.send_many(peer, (data,)):
            waiting = len(self._backlogs[peer])
            raise PeerSlow(f"{waiting} frames wait for peer {peer.hex()} at {self.address}: it does not read")

    def send_many(self, peer: PeerKey, frames: Sequence[bytes]) -> int:
        self._socket.guard()
        for data in frames:
            self._limits.check(data)
        backlog, taken = self._backlogs.get(peer), 0
        if backlog is None:
            # ZeroMQ forgets a peer a little after it has told us, and until then takes frames that go nowhere
            if peer not in self._descriptor_of:
                raise self._gone(peer)
            while taken < len(frames):
                some = frames[taken : taken + _together(frames, taken)]
                handed = self._hand_over(peer, some)
                if handed is None and not taken:
                    raise self._gone(peer)
                if not handed:
                    break
                taken += len(some)
        if taken < len(frames):
            backlog = self._backlogs.setdefault(peer, deque())
            fit = frames[taken : taken + max(0, self._limits.queue - len(backlog))]
            backlog.extend(fit)
            taken += len(fit)
        if self._inbox.wanted:
            self._socket.look_again()
        return taken

    def _gone(self, peer: PeerKey) -> PeerGone:
        return PeerGone(f"no peer {peer.hex()} is connected to {self.address}")

    def identity(self, peer: PeerKey) -> str | None:
        known = self._known.get(peer)
        return known[1] if known is not None else None

    def recheck(self) -> None:
        if self._guard is None or self._socket.closed:
            return
        self._read_monitor()
        for peer, (key, identity) in list(self._known.items()):
            if self._guard.admit(key) != identity:
                self._cut(peer, self._descriptor_of.get(peer))

    def waiting(self, peer: PeerKey) -> int:
        return len(self._backlogs.get(peer, ()))

    @property
    def refused(self) -> Mapping[str, int]:
        return self._failed + (self._socket.zap.refused if self._socket.zap is not None else Counter())

    async def aclose(self, grace: float = 0.0) -> int:
        if self._ended:
            return 0
        self._ended = True
        self._inbox.close()
        _remove_path(self._path, self._file)
        await self._socket.aclose(self._flush, grace)
        return sum(map(len, self._backlogs.values()))

    def _hand_over(self, peer: PeerKey, frames: Sequence[bytes]) -> bool | None:
        """True: ZeroMQ took them; False: no room; None: no such peer. Several leave as the parts of one message, which wakes ZeroMQ's
        thread once, and arrive one after the other."""
        raw, last = self._socket.raw, len(frames) - 1
        try:
            _send(raw, peer, MORE)
            for number, data in enumerate(frames):
                _send(raw, data, NOW if number == last else MORE)
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
                taken = self._hand_over(peer, (backlog[0],))
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
        for number in range(BURST):
            try:
                peer = PeerKey(receive(NOW)) if number > 1 or self._socket.readable else None
            except zmq.Again:
                peer = None
            if peer is None:
                for gone in lost:
                    self._report_lost(gone)
                return
            frame = receive(NOW, copy=False)
            if (
                peer not in self._descriptor_of and _descriptor(frame) is None
            ):  # from a peer so old that ZeroMQ does not know where it is: none of ours
                self._failed["no handshake of ours"] += 1
            elif self._guard is None or self._lets_in(self._guard, peer, frame):
                if peer not in self._descriptor_of:
                    self._meet(peer, frame)
                if frame.more or len(frame) > self._limits.frame:
                    self._unfit(peer, frame)
                else:
                    arrived.append((peer, frame.bytes))
            while frame.more:
                frame = receive(NOW, copy=False)
        self._lost = lost | self._lost

    def _unfit(self, peer: PeerKey, frame: zmq.Frame) -> None:
        """Say so; whoever sends too much is cut off, too."""
        if frame.more:
            self._inbox.arrived.append(Unfit(peer, "of several parts", "a frame of several parts; ours have one"))
            return
        self._inbox.arrived.append(Unfit(peer, TOO_LARGE, self._limits.too_large(len(frame))))
        self._cut(peer, _descriptor(frame))

    def _lets_in(self, guard: Guard, peer: PeerKey, frame: zmq.Frame) -> bool:
        """Whether this frame comes from a key that is let in, and from the one that this peer has always had."""
        key = PublicKey(str(frame.get("User-Id")))  # what our ZAP handler said at the handshake
        known = self._known.get(peer)
        if known is not None and known[0] == key:
            return True
        identity = guard.admit(key) if known is None else None
        if identity is not None:
            self._known[peer] = (key, identity)
            return True
        self._failed["key was removed" if known is None else "connection of another key"] += 1
        self._cut(peer, _descriptor(frame))
        return False

    def _cut(self, peer: PeerKey, descriptor: int | None) -> None:
        """Break the connection under ZeroMQ, which has no way to do it. What comes from it meanwhile is judged anew."""
        self._known.pop(peer, None)
        self._lost[peer] = None
        if descriptor is not None and descriptor not in self._broken:
            _shut_down(descriptor)
        self._inbox.wake()

    def _guard_failed(self, cause: BaseException) -> None:
        self._socket.close_now()
        self._inbox.close(
            GuardFailed(f"the listener at {self.address} has closed: its check of keys died of {type(cause).__name__}")
        )

    def _meet(self, peer: PeerKey, frame: zmq.Frame) -> None:
        """Remember which descriptor the peer is on. It may have gone already, and descriptors are re-used."""
        self._read_monitor()
        descriptor = _descriptor(frame)
        assert descriptor is not None
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
            counted, self._just_failed = self._just_failed, bool(event & FAILED)
            if event & FAILED:  # its value is no descriptor; that connection's end follows
                if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._failed["no handshake of ours"] += 1
                elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._failed["handshake broken off"] += 1
                continue
            if event == zmq.EVENT_ACCEPTED:
                self._broken.discard(descriptor)
                continue
            self._broken.add(descriptor)
            peer = self._peer_at.pop(descriptor, None)
            if peer is not None:
                self._lost[peer] = None
            elif not counted:
                self._failed["gone unheard"] += 1

    def _report_lost(self, peer: PeerKey) -> None:
        self._known.pop(peer, None)
        descriptor = self._descriptor_of.pop(peer, None)
        if descriptor is not None and self._peer_at.get(descriptor) == peer:
            del self._peer_at[descriptor]
        unsent = len(self._backlogs.pop(peer, ()))
        self.undeliverable += unsent
        if descriptor is not None or unsent:
            self._inbox.arrived.append(Disconnected(peer))


class ZmqConnection:
    """See `Connection`."""

    def __init__(self, address: str, limits: Limits, security: Security | None = None) -> None:
        self.address, self._server = pin_for(address, security)
        self._security = security
        self._broken_off = 0  # handshakes, one after the other
        self._limits = limits
        self._backlog: deque[bytes] = deque()
        self._connected = False
        self._socket = OwnedSocket(zmq.DEALER, limits, self._look)
        self._inbox: Inbox[bytes] = Inbox(f"the connection to {self.address}", self._refill)
        self._socket.raw.set(zmq.IDENTITY, b"\x01" + secrets.token_bytes(15))
        self._socket.watch(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED, self._hear_monitor)
        if self._security is not None and self._server is not None:
            protect_connection(self._socket.raw, self._security.keys, self._server, limits.frame)
        try:
            self._socket.raw.connect(self.address)
        except zmq.ZMQError as error:
            self._socket.abandon()
            raise TransportError(
                f"cannot connect to {self.address!r}: {error}; expected something like tcp://127.0.0.1:7777"
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
            _send(self._socket.raw, data, NOW)
        except zmq.Again:
            return False
        return True

    def _hear_monitor(self) -> None:
        for event, _ in self._socket.monitored():
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._connected:
                self._broken_off = 0
            elif event & FAILED:
                self._shook_no_hands(event)
        self._look()

    def _shook_no_hands(self, event: int) -> None:
        """ZeroMQ tries again only after a handshake that was broken off; anything else is final."""
        self._broken_off += 1
        if self._security is None or self._server is None:
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._inbox.close(
                    Unauthorized(f"{self.address} does not speak as we do: it is protected by keys, or no OpenTinker")
                )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._inbox.close(not_admitted(self.address, self._security.keys))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or self._broken_off >= PATIENCE:
            self._inbox.close(not_reached(self.address, self._server))

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
        for number in range(BURST):
            if number < 2 and not self._socket.readable:  # an exception takes longer, but looking at every frame too
                return
            try:
                arrived.append(receive(NOW))
            except zmq.Again:
                return


def _together(frames: Sequence[bytes], first: int) -> int:
    """How many frames from this one on leave as one message: at least one."""
    room = PARTS_BYTES
    for count, data in enumerate(frames[first : first + PARTS]):
        room -= len(data)
        if room < 0 and count:
            return count
    return min(PARTS, len(frames) - first)


def _bind_error(address: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(address)
    return TransportError(f"cannot listen at {address!r}: {error}; expected something like tcp://127.0.0.1:0")


def _in_use(address: str) -> AddressInUse:
    return AddressInUse(
        f"{address} is already in use: stop the process that listens there, or choose another port "
        "(port 0, as in tcp://127.0.0.1:0, takes any free one)"
    )


def _descriptor(frame: zmq.Frame) -> int | None:
    """Which connection the frame came on."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _shut_down(descriptor: int) -> None:
    """Whoever is on the other end of this descriptor of ZeroMQ's; a copy is closed, never the original."""
    with suppress(OSError):
        copy = os.dup(descriptor)
        try:
            with socket.socket(fileno=copy) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            with suppress(OSError):
                os.close(copy)


def _refuse_taken_path(address: str) -> None:
    """ZeroMQ would take an ipc path away from whoever listens there."""
    path = _path_of(address)
    if path:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise _in_use(address)


def _path_of(address: str) -> str:
    """Of an ipc address; "" of others."""
    scheme, _, path = address.partition("://")
    return path if scheme == "ipc" else ""


def _remove_path(path: str, file: tuple[int, int] | None) -> None:
    """ZeroMQ leaves it. Not if somebody else listens there now."""
    if file is not None and _file_at(path) == file:
        Path(path).unlink(missing_ok=True)


def _file_at(path: str) -> tuple[int, int] | None:
    """Which file is there; None: none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None
