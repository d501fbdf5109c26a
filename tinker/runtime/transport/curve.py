"""CURVE (Curve25519, as ZeroMQ speaks it): new keys, and the options that a socket needs for them."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from tinker.runtime.transport.security import KeyPair, PublicKey

OVERHEAD = 33  # bytes that CURVE adds to a frame; ZeroMQ's limit counts them
DOMAIN = (
    "opentinker"  # not empty: ZeroMQ then refuses everybody whom no handler has accepted, also when there is no handler
)


def new_keys() -> KeyPair:
    """A key pair from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public_text(z85.decode(public)), f"sec-{z85.decode(secret).hex()}")


def keys_of(secret: str) -> KeyPair:
    """The pair of which this is the secret half. ValueError (which does not repeat it) if it is none."""
    try:
        public = zmq.curve_public(_z85(secret))
    except Exception:
        raise ValueError("this is no secret key: expected sec- and 64 hex digits") from None
    return KeyPair(public_text(z85.decode(public)), secret)


def public_text(raw: bytes) -> PublicKey:
    """As people read it."""
    return PublicKey(f"pub-{raw.hex()}")


def protect_listener(socket: zmq.Socket[bytes], keys: KeyPair, frame: int) -> None:
    """Before it is bound. `frame`: bytes of the largest frame."""
    socket.set(zmq.MAXMSGSIZE, frame + OVERHEAD)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, _z85(keys.secret))
    socket.set_string(zmq.ZAP_DOMAIN, DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def protect_connection(socket: zmq.Socket[bytes], keys: KeyPair, server: PublicKey, frame: int) -> None:
    """Before it connects."""
    socket.set(zmq.MAXMSGSIZE, frame + OVERHEAD)
    socket.set(zmq.CURVE_PUBLICKEY, _z85(keys.public))
    socket.set(zmq.CURVE_SECRETKEY, _z85(keys.secret))
    socket.set(zmq.CURVE_SERVERKEY, _z85(server))


def _z85(key: str) -> bytes:
    """ZeroMQ's own spelling."""
    encoded: bytes = z85.encode(bytes.fromhex(key[4:]))
    return encoded
