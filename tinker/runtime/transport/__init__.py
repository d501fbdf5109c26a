"""Frames of bytes between processes (ZeroMQ) or inside one (memory), behind one small interface."""

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
)
from tinker.runtime.transport.memory import MemoryNetwork
from tinker.runtime.transport.zmq import ZmqTransport

__all__ = [
    "BURST",
    "AddressInUse",
    "Arrival",
    "Closed",
    "Connection",
    "Disconnected",
    "FrameTooLarge",
    "Limits",
    "Listener",
    "MemoryNetwork",
    "PeerGone",
    "PeerKey",
    "PeerSlow",
    "Transport",
    "TransportError",
    "ZmqTransport",
]
