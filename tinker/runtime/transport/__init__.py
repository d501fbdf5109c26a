"""Frames of bytes between processes (ZeroMQ) or inside one (memory), behind one small interface."""

from tinker.runtime.transport.curve import keys_of, new_keys
from tinker.runtime.transport.interface import (
    BURST,
    AddressInUse,
    Arrival,
    Closed,
    Connection,
    Disconnected,
    FrameTooLarge,
    Limits,
    Listener,
    PeerGone,
    PeerKey,
    PeerSlow,
    Transport,
    TransportError,
    Unfit,
)
from tinker.runtime.transport.memory import MemoryNetwork
from tinker.runtime.transport.security import (
    Guard,
    GuardFailed,
    KeyPair,
    PublicKey,
    Security,
    Unauthorized,
    fingerprint,
    pinned,
    unpinned,
)
from tinker.runtime.transport.zmq import ZmqTransport

__all__ = [
    "BURST",
    "AddressInUse",
    "Arrival",
    "Closed",
    "Connection",
    "Disconnected",
    "FrameTooLarge",
    "Guard",
    "GuardFailed",
    "KeyPair",
    "Limits",
    "Listener",
    "MemoryNetwork",
    "PeerGone",
    "PeerKey",
    "PeerSlow",
    "PublicKey",
    "Security",
    "Transport",
    "TransportError",
    "Unauthorized",
    "Unfit",
    "ZmqTransport",
    "fingerprint",
    "keys_of",
    "new_keys",
    "pinned",
    "unpinned",
]
