"""The file of authorized keys: who may connect, as what, under which names, for which runs.

One line for each key: `PUBLICKEY role[,role] name [runs=glob,glob]`; empty lines and lines that begin with # are skipped. The file is read
again when it changes or when told to. A file that does not parse any more changes nothing and is complained about; a file that is gone
does the same. A key that is removed from it is cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import structlog

from tinker.protocol.values import PeerName, Role, RunId
from tinker.runtime.clock import Clock
from tinker.runtime.keys import NAME, KeyFileError
from tinker.runtime.transport import PublicKey, fingerprint
from tinker.runtime.transport.security import PUBLIC

LOOK = 1.0  # seconds between looks at the file
REMEMBERED = 1000  # unknown keys that are named in the log, each once

log = structlog.get_logger("keys")


@dataclass(frozen=True, slots=True)
class Grant:
    """What one key may do."""

    key: PublicKey
    roles: tuple[Role, ...]
    name: str
    runs: tuple[str, ...] = ("*",)

    def names(self, peer: PeerName) -> bool:
        """Whether a peer with this key may call itself so."""
        return peer == self.name or peer.startswith(f"{self.name}-")

    def allows(self, run: RunId) -> bool:
        return any(fnmatchcase(run, glob) for glob in self.runs)


def parse_authorized(text: str, file: Path) -> dict[PublicKey, Grant]:
    """KeyFileError names the file and the line."""
    grants: dict[PublicKey, Grant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            grant = _grant(line.split())
            if grant.key in grants:
                raise ValueError(f"this key is on an earlier line, too (as {grants[grant.key].name})")
        except ValueError as error:
            raise KeyFileError(f"{file}, line {number}: {error}") from None
        grants[grant.key] = grant
    return grants


def _grant(words: list[str]) -> Grant:
    if not PUBLIC.fullmatch(words[0]):  # it may be a secret, so it is not repeated
        raise ValueError("the first word is no public key; expected pub- and 64 hex digits")
    if len(words) not in (3, 4):
        raise ValueError(f"{len(words)} words; expected PUBLICKEY role[,role] name [runs=glob,glob]")
    unknown = [role for role in words[1].split(",") if role not in list(Role)]
    if unknown:
        raise ValueError(f"unknown role {unknown[0]!r}; there are {', '.join(Role)}")
    if not NAME.fullmatch(words[2]):
        raise ValueError(f"{words[2]!r} is no name: expected letters, digits, '_', '.' and '-'")
    runs = ["*"]
    if len(words) == 4:
        option, _, globs = words[3].partition("=")
        runs = globs.split(",")
        if option != "runs" or not all(runs):
            raise ValueError(f"the fourth word must be runs=glob,glob, not {option!r}")
    return Grant(PublicKey(words[0]), tuple(map(Role, words[1].split(","))), words[2], tuple(runs))


@dataclass(slots=True)
class AuthorizedKeys:
    """The file's present content. A transport's guard: an identity is the key with its roles and its name, so whoever's line says
    something else is cut off and comes back as what it now is. What `runs` says is asked for each run, and cuts nobody off."""

    file: Path
    grants: Mapping[PublicKey, Grant] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    _stamp: tuple[int, ...] = ()
    _named: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, file: Path) -> AuthorizedKeys:
        """KeyFileError if it cannot be read, or does not parse."""
        keys = cls(file)
        keys._read()
        return keys

    def admit(self, key: PublicKey) -> str | None:
        grant = self.grants.get(key)
        if grant is None:
            self._unknown(key)
            return None
        return f"{key} {','.join(grant.roles)} {grant.name}"

    def only(self, *roles: Role) -> OnlyRoles:
        """The guard of a listener that is not for everybody."""
        return OnlyRoles(self, roles)

    def grant(self, identity: str | None) -> Grant | None:
        """What holds for this identity now."""
        return self.grants.get(PublicKey(identity.partition(" ")[0])) if identity is not None else None

    def changed(self) -> bool:
        """Whether the file is another than the one that was read."""
        return self._look() != self._stamp

    def reload(self) -> bool:
        """Read it again; False (and a line in the log) if it is not there or does not parse: then everything stays as it is."""
        before = self.grants
        try:
            self._read()
        except KeyFileError as error:
            self._stamp = self._look()
            log.error("authorized keys unchanged", reason=str(error))
            return False
        gone = [grant.name for key, grant in before.items() if key not in self.grants]
        log.info("authorized keys read", file=str(self.file), keys=len(self.grants), removed=", ".join(gone))
        self._named.clear()
        return True

    def _read(self) -> None:
        stamp = self._look()
        try:
            text = self.file.read_text(encoding="utf-8")
        except OSError as error:
            raise KeyFileError(f"cannot read the authorized keys in {self.file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise KeyFileError(f"{self.file} is no text, so no file of authorized keys") from None
        self.grants = parse_authorized(text, self.file)
        self._stamp = stamp

    def _look(self) -> tuple[int, ...]:
        try:
            found = self.file.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _unknown(self, key: PublicKey) -> None:
        self.refused["unknown key"] += 1
        if key not in self._named and len(self._named) < REMEMBERED:
            self._named.add(key)
            log.warning("refused", what="key", key=fingerprint(key), reason=f"it is not in {self.file}")


@dataclass(frozen=True, slots=True)
class OnlyRoles:
    """Lets in keys of some roles only."""

    keys: AuthorizedKeys
    roles: Collection[Role]

    def admit(self, key: PublicKey) -> str | None:
        identity = self.keys.admit(key)
        grant = self.keys.grant(identity)
        if grant is not None and set(grant.roles).isdisjoint(self.roles):
            self.keys.refused["wrong role"] += 1
            return None
        return identity


async def keep_reading(keys: AuthorizedKeys, clock: Clock, recheck: Callable[[], None]) -> None:
    """Read the file again whenever it has changed, and have everybody who is connected checked again."""
    while True:
        await clock.sleep_until(clock.now() + LOOK)
        if keys.changed() and keys.reload():
            recheck()
