"""What a transport promises: frames of bytes between one listener and many connections.

Order: frames from one peer to another arrive in the order in which they were sent. Loss: a frame that `send` accepted is lost only with
the connection it travelled on (the process died, the network broke, a side was closed); it is never dropped because somebody was slow.
So `send` returning is no proof of arrival: whoever must know asks for an answer. Bounds: every queue has one; when it is full the sender
is told (`PeerSlow`), and a receiver that does not read holds its senders up and nobody else. Blocking: `send` never waits.
Cancelling a `receive` loses nothing. One task receives at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

PeerKey = NewType("PeerKey", bytes)
"""One connection as its listener knows it: random, never chosen by a user, so no two peers can share one. It survives a reconnect."""

TOO_LARGE = "too large"
BEYOND = 8  # a frame up to so many times the limit is read and refused by name; ZeroMQ itself cuts whoever announces a larger one
BURST = 256  # frames handed over at once, so that timers and other tasks get their turn in between


class TransportError(Exception):
    """Base of what goes wrong here."""


class AddressInUse(TransportError):
    """Somebody else listens there."""


class PeerGone(TransportError):
    """The frame was not taken: no such peer is connected."""


class PeerSlow(TransportError):
    """The frame was not taken: the peer's queue is full. Wait, or give the peer up."""


class FrameTooLarge(TransportError):
    """The frame was not taken: it is above the limit."""


class Closed(TransportError):
    """This end was closed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`frame`: bytes of one frame, refused on both ends (a network may cut whoever sends one many times as
    large). `queue`: frames that wait for one peer beyond what the network itself holds.
    `heartbeat` (seconds): how often a silent network peer is probed; it counts as disconnected after three times that."""

    frame: int = 16 * 1024 * 1024
    queue: int = 10_000
    heartbeat: float = 1.0

    def check(self, data: bytes) -> None:
        """FrameTooLarge if it is."""
        if len(data) > self.frame:
            raise FrameTooLarge(self.too_large(len(data)))

    def too_large(self, size: int) -> str:
        return f"a frame of {size} bytes; at most {self.frame} fit"


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """This peer's connection broke or was closed; sending to it raises PeerGone until it is heard again, which means that it is back.
    Early and nearly always right, yet a hint: a lease is the truth."""

    peer: PeerKey


@dataclass(frozen=True, slots=True)
class Unfit:
    """This peer sent what is no frame: `why` in a few words, `reason` with what was expected. Its content is gone."""

    peer: PeerKey
    why: str
    reason: str


Arrival = tuple[PeerKey, bytes] | Disconnected | Unfit


class Listener(Protocol):
    """The end that many connect to."""

    @property
    def address(self) -> str:
        """Where to connect, with the port that was really bound."""

    async def receive(self) -> Arrival:
        """The next frame with its sender, or that it was none, or a disconnect (after that peer's frames). Closed when this end
        is closed."""

    async def receive_many(self) -> list[Arrival]:
        """At least one and at most BURST arrivals: waits for the first, takes what else is there."""

    def send(self, peer: PeerKey, data: bytes) -> None:
        """Hand over or queue. PeerGone, PeerSlow or FrameTooLarge: nothing was sent. Frames still queued for a peer that disconnects
        are lost and counted in `undeliverable`."""

    def send_many(self, peer: PeerKey, frames: Sequence[bytes]) -> int:
        """Hand over or queue these, in this order, and cheaper than one by one: how many were taken, less than all if the queue is full.
        PeerGone or FrameTooLarge: nothing was sent."""

    def identity(self, peer: PeerKey) -> str | None:
        """Who the guard says this peer is. It holds for every frame that has arrived from the peer. None: no guard, or no such peer."""

    def recheck(self) -> None:
        """Ask the guard again about everybody: whom it no longer lets in is cut off, and nothing it sent later arrives."""

    def waiting(self, peer: PeerKey) -> int:
        """How many frames wait for this peer because it does not read them as fast."""

    @property
    def refused(self) -> Mapping[str, int]:
        """How many connections were refused, failed at the handshake, or ended before we read a frame of theirs, by reason."""

    @property
    def undeliverable(self) -> int:
        """Frames that `send` took and that are known to be lost."""

    async def aclose(self, grace: float = 0.0) -> int:
        """Wait at most `grace` seconds for queued frames to leave, then close. How many are known not to have left."""


class Connection(Protocol):
    """The end that connects; it keeps trying, and reconnects by itself, until it is closed."""

    async def receive(self) -> bytes:
        """The next frame. Closed when this end is closed; Unauthorized when the listener does not let us in."""

    async def receive_many(self) -> list[bytes]:
        """At least one and at most BURST frames: waits for the first, takes what else is there."""

    def send(self, data: bytes) -> None:
        """Hand over or queue: while the listener is away frames wait, up to the bound, then PeerSlow."""

    async def aclose(self, grace: float = 0.0) -> int:
        """Wait at most `grace` seconds for queued frames to leave, then close. How many are known not to have left."""


class Transport(Protocol):
    """A way to make both ends. Call inside a running event loop."""

    def listen(self, address: str, limits: Limits = ...) -> Listener:
        """AddressInUse if it is taken, TransportError if it is no address."""

    def connect(self, address: str, limits: Limits = ...) -> Connection:
        """Returns at once; whether anybody listens there shows later."""
