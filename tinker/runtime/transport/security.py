"""Keys at both ends of a connection: who we are, whom we let in, and the listener that an address names.

A public key is written `pub-` and 64 hex digits, a secret one `sec-` and 64 hex digits, so that nobody takes one for the other and a
secret is easily searched for. An address may end with the key of whoever listens there: `tcp://10.0.0.1:7654#pub-...`. A connection to
such an address is encrypted and goes to the holder of that key or nowhere; one to an address without a key is neither.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import NewType, Protocol

from tinker.runtime.transport.interface import TransportError

PublicKey = NewType("PublicKey", str)
PUBLIC = re.compile(r"pub-[0-9a-f]{64}")
SECRET = re.compile(r"sec-[0-9a-f]{64}")


class Unauthorized(TransportError):
    """The listener does not let this key in, or is not the one that the address names."""


class GuardFailed(TransportError):
    """The listener has closed, because nobody checks keys any more."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One key. The secret half appears in no repr."""

    public: PublicKey
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if not PUBLIC.fullmatch(self.public) or not SECRET.fullmatch(self.secret):
            raise ValueError("this is no key pair: expected pub- and sec-, each with 64 hex digits")


class Guard(Protocol):
    """Decides about keys. Called at every handshake and whenever `recheck` asks; it must not wait."""

    def admit(self, key: PublicKey) -> str | None:
        """The identity of whoever holds this key; None: nobody we know."""


@dataclass(frozen=True, slots=True)
class Security:
    """`keys`: ours, at both ends. `guard`: whom a listener lets in; without one it is open to everybody and not encrypted."""

    keys: KeyPair
    guard: Guard | None = None


def fingerprint(key: str) -> str:
    """A short name of a public key for logs and people."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def pinned(address: str, key: PublicKey) -> str:
    """The address with the key of whoever listens there."""
    return f"{address}#{key}"


def unpinned(address: str) -> tuple[str, PublicKey | None]:
    """The address alone, and the key that it names. TransportError if that is no public key (which the error does not repeat)."""
    bare, sign, key = address.partition("#")
    if not sign:
        return address, None
    if not PUBLIC.fullmatch(key):
        raise TransportError(f"what follows # in the address {bare} is no public key: expected pub- and 64 hex digits")
    return bare, PublicKey(key)


def pin_for(address: str, security: Security | None) -> tuple[str, PublicKey | None]:
    """Like `unpinned`, and TransportError if the address wants a key and we have none."""
    bare, server = unpinned(address)
    if server is not None and security is None:
        raise TransportError(f"{bare} is protected by keys and we have none: make one with `opentinker keys new NAME`")
    return bare, server


def not_admitted(address: str, keys: KeyPair) -> Unauthorized:
    return Unauthorized(
        f"{address} does not accept our key {fingerprint(keys.public)}: its operator must add {keys.public} to the file of "
        "authorized keys, with the role that we need"
    )


def not_reached(address: str, server: PublicKey) -> Unauthorized:
    return Unauthorized(
        f"{address} ends every handshake: it does not hold the key {fingerprint(server)} that we expect there, or it checks "
        "no keys; compare the server key with what `opentinker keys show` says on that machine"
    )
