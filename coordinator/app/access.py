"""Who may listen where, and what a member may do with its key.

Without keys a daemon listens on loopback, or on an ipc path in a directory that only we can enter. Anywhere else it needs its own key and a
file of authorized keys. Then a member is what its key says: its role, its name (or that name with `-` and anything after it), and, for a
host, the runs it may submit or play for. What a role may say is the core's business (`CALLS`); what it may ask the
daemon itself, for which nobody need be a member, is written here (`ASKS`).
"""

from __future__ import annotations

import ipaddress
import os
import signal
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import structlog

from tinker.protocol import ToCoordinator, ToDaemon
from tinker.protocol.to_coordinator import Enlist, Hello, Submit
from tinker.protocol.to_daemon import Drain, Watch
from tinker.protocol.values import Role
from tinker.runtime.authorized import AuthorizedKeys, Grant, keep_reading
from tinker.runtime.clock import Clock
from tinker.runtime.keys import KeyFileError, read_keys, read_public
from tinker.runtime.transport import (
    KeyPair,
    Listener,
    PeerKey,
    PublicKey,
    Security,
    TransportError,
    fingerprint,
    pinned,
    unpinned,
)

KEY, SERVER_KEY, AUTHORIZED = "OPENTINKER_KEY", "OPENTINKER_SERVER_KEY", "OPENTINKER_AUTHORIZED"  # they name files
ASKS: Mapping[Role, frozenset[type]] = {
    Role.HOST: frozenset({Watch}),
    Role.TASKSERVER: frozenset({Watch}),
    Role.OPERATOR: frozenset({Watch, Drain}),
    Role.PLAYER: frozenset(),
    Role.VIEWER: frozenset({Watch}),
}
log = structlog.get_logger("access")
VARIABLES = (KEY, SERVER_KEY, AUTHORIZED)


class UnsafeAddress(Exception):
    """The address would accept strangers."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a process was given: its own pair and that key's name, the server's public key, who may connect to it. None: nothing."""

    own: KeyPair | None = None
    name: str = ""
    server: PublicKey | None = None
    authorized: AuthorizedKeys | None = None

    def security(self, *roles: Role) -> Security | None:
        """For a transport whose listeners let in who is authorized (in one of these roles, if any are given)."""
        if self.own is None:
            return None
        guard = self.authorized.only(*roles) if self.authorized is not None and roles else self.authorized
        return Security(self.own, guard)

    def to(self, address: str) -> str:
        """The coordinator's address with its key, if we know it."""
        bare, named = unpinned(address)
        server = named or self.server
        if self.own is not None and server is None:
            raise KeyFileError(
                "we have a key of our own, but whose key is the coordinator's? Give it with --server-key"
            )
        if self.own is None and server is not None:
            raise KeyFileError("the coordinator has a key, and we have none: give ours with --key")
        if server is None and urlsplit(bare).scheme == "tcp" and not is_loopback(urlsplit(bare).hostname or ""):
            raise UnsafeAddress(f"{bare} is on another machine: that needs keys; give --key and --server-key")
        return pinned(bare, server) if server is not None else bare


def given_keys(key: Path | None, server: str, authorized: Path | None, environment: Mapping[str, str]) -> Keys:
    """The keys that the options name, or else the environment. KeyFileError says what is wrong with them."""
    own = key or _named(environment, KEY)
    listed = authorized or _named(environment, AUTHORIZED)
    public = server or environment.get(SERVER_KEY, "")
    return Keys(
        read_keys(own) if own is not None else None,
        own.stem if own is not None else "",
        read_public(public) if public else None,
        AuthorizedKeys.read(listed) if listed is not None else None,
    )


def _named(environment: Mapping[str, str], variable: str) -> Path | None:
    return Path(environment[variable]) if environment.get(variable) else None


def check_listen(address: str, keys: Keys = Keys()) -> None:
    """UnsafeAddress unless only those can connect who may."""
    if (keys.own is None) != (keys.authorized is None):
        raise UnsafeAddress("to let in holders of keys, give both: --key (our own) and --authorized (theirs)")
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        _check_ipc(address.partition("://")[2])
    elif parts.scheme != "inproc" and not is_loopback(parts.hostname or "") and keys.own is None:
        raise UnsafeAddress(
            f"refusing to listen on {address} without keys: anybody could connect. Make keys (`opentinker keys new NAME`) "
            "and give --key and --authorized, or bind tcp://127.0.0.1:PORT and reach it through an SSH tunnel"
        )


def check_loopback(where: str) -> None:
    """UnsafeAddress unless HOST:PORT is of this machine only: the pages there need no key."""
    if not is_loopback(urlsplit(f"//{where}").hostname or ""):
        raise UnsafeAddress(
            f"refusing to serve pages on {where}: they need no key, so only loopback is allowed; choose 127.0.0.1 and reach it "
            "through an SSH tunnel"
        )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ipc(path: str) -> None:
    """The directory keeps others out: the socket itself is open to whoever reaches it."""
    directory = Path(path).parent
    if not path.startswith("/"):
        raise UnsafeAddress(
            f"ipc://{path} is no absolute path in a directory of ours; expected ipc:///run/user/1000/opentinker/socket"
        )
    try:
        found = directory.stat()
    except OSError as error:
        raise UnsafeAddress(
            f"cannot listen on ipc://{path}: {directory}: {error.strerror}; make it with mode 700"
        ) from None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UnsafeAddress(
            f"refusing to listen on ipc://{path}: others can enter {directory} (mode {stat.S_IMODE(found.st_mode):o}, "
            f"user {found.st_uid}); say `chmod 700 {directory}`, or take a directory of your own"
        )


@dataclass(slots=True)
class Access:
    """What the peers of one listener may do. Without authorized keys everybody who gets through may do everything."""

    listener: Listener
    authorized: AuthorizedKeys | None = None
    _told: Counter[tuple[str, str]] = field(default_factory=Counter)

    def newly_refused(self) -> Counter[tuple[str, str]]:
        """Connections refused since the last call, by reason. They are in the log, too."""
        now = Counter({("connection", why): number for why, number in self.listener.refused.items()})
        new, self._told = now - self._told, now
        for (_, why), number in sorted(new.items()):
            log.warning("refused", what="connection", reason=why, times=number)
        return new

    def identity(self, peer: PeerKey) -> str:
        """The name on the line of its key; "" if nobody has one."""
        grant = self.authorized.grant(self.listener.identity(peer)) if self.authorized is not None else None
        return f"{grant.name} ({fingerprint(grant.key)})" if grant is not None else ""

    def forgotten(self, hello: Hello) -> bool:
        """Whether no key may be this member any more."""
        grants = self.authorized.grants.values() if self.authorized is not None else ()
        held = any(hello.role in grant.roles and grant.names(hello.name) for grant in grants)
        return self.authorized is not None and not held

    def why_not(self, peer: PeerKey, message: ToCoordinator | ToDaemon) -> str:
        """Why the peer's key does not allow this message; "": it does."""
        if self.authorized is None:
            return ""
        grant = self.authorized.grant(self.listener.identity(peer))
        if grant is None:
            return "your key is not authorized (any more)"
        who = f"your key {fingerprint(grant.key)} ({grant.name})"
        match message:
            case Hello():
                return _why_not_hello(who, grant, message)
            case Submit() if not grant.allows(message.spec.run):
                return f"{who} may not submit run {message.spec.run!r}, only {', '.join(grant.runs)}"
            case Watch() | Drain() if not any(type(message) in ASKS[role] for role in grant.roles):
                return f"{who} is for {', '.join(grant.roles)}, which may not send this; {_askers(type(message))} may"
            case Enlist() if not grant.allows(message.run):
                return f"{who} may not play for run {message.run!r}, only for {', '.join(grant.runs)}"
            case _:
                return ""


def _askers(kind: type) -> str:
    return ", ".join(role for role, asks in ASKS.items() if kind in asks)


def _why_not_hello(who: str, grant: Grant, hello: Hello) -> str:
    """A member is what its key says. A task server's data connection must be protected by the same key."""
    if hello.role not in grant.roles:
        return f"{who} is for {', '.join(grant.roles)}, not for {hello.role}; the operator can add the role to its line"
    if not grant.names(hello.name):
        return (
            f"{who} may not take the name {hello.name!r}; take {grant.name!r}, or one that begins with '{grant.name}-'"
        )
    try:
        protected = not hello.data or unpinned(hello.data)[1] == grant.key
    except TransportError:
        protected = False
    return "" if protected else f"{who} does not protect the data connection that it offers: start it with --authorized"


async def follow_file(authorized: AuthorizedKeys, clock: Clock, *listeners: Listener) -> None:
    """Read the file again when it changes, and on SIGHUP. Whoever is no longer in it is cut off."""

    def recheck() -> None:
        for listener in listeners:
            listener.recheck()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_reading, authorized, clock, recheck, name="look at authorized keys")
        tasks.start_soon(_on_hangup, authorized, recheck, name="hangup")


async def _on_hangup(authorized: AuthorizedKeys, recheck: Callable[[], None]) -> None:
    with anyio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            if authorized.reload():
                recheck()
