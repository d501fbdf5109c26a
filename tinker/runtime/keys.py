"""Key files: a secret one that only its owner can read, and a public one to hand on.

NAME.key holds the secret key, mode 0600 in a directory of mode 0700; NAME.pub the public one. Both are one line with comments. No error
repeats what a file holds.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from tinker.runtime.transport import KeyPair, PublicKey, keys_of, new_keys
from tinker.runtime.transport.security import PUBLIC, SECRET

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class KeyFileError(Exception):
    """A key file that cannot be used or written; the message says what to do."""


def default_directory() -> Path:
    """Where keys lie unless somebody says otherwise."""
    return Path.home() / ".opentinker" / "keys"


def create_keys(name: str, directory: Path) -> KeyPair:
    """A new key pair, and its files NAME.key and NAME.pub in the directory. Nothing is ever overwritten."""
    if not NAME.fullmatch(name):
        raise KeyFileError(f"{name!r} is no name for a key: expected letters, digits, '_', '.' and '-'")
    secret, public = directory / f"{name}.key", directory / f"{name}.pub"
    taken = [path for path in (secret, public) if path.exists()]
    if taken:
        raise KeyFileError(f"{taken[0]} exists already; choose another name, or remove it if nobody uses that key")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory, "chmod 700")
        keys = new_keys()
        _write(
            secret,
            f"# Secret key {name!r} of OpenTinker. Whoever reads this file can act as {name!r}.\n{keys.secret}\n",
            0o600,
        )
        _write(public, f"{keys.public}\n", 0o644)
    except OSError as error:
        raise KeyFileError(f"cannot write keys to {directory}: {error.strerror}") from error
    return keys


def read_keys(file: Path) -> KeyPair:
    """The key pair in a secret key file. KeyFileError if others can read it, or it holds no key."""
    try:
        _check_private(file, "chmod 600")
    except OSError as error:
        # somebody may have given us the secret itself
        what = "what was given as a key file" if SECRET.search(str(file)) else str(file)
        raise KeyFileError(
            f"cannot read {what}: {error.strerror}; expected a file made by `opentinker keys new`"
        ) from None
    try:
        return keys_of(_line(file))
    except ValueError:
        raise KeyFileError(
            f"{file} holds no secret key; expected a file NAME.key made by `opentinker keys new`"
        ) from None


def read_public(given: str) -> PublicKey:
    """A public key: itself, or a file that holds it."""
    text = given
    if not PUBLIC.fullmatch(given) and not SECRET.search(given):
        text = _line(Path(given))
    if not PUBLIC.fullmatch(text):
        raise KeyFileError("this is no public key: expected pub- and 64 hex digits, or a file NAME.pub that holds them")
    return PublicKey(text)


def _line(file: Path) -> str:
    """The one line that is no comment, "" if there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise KeyFileError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{file} is no text, so no key file") from None
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return found[0] if len(found) == 1 else ""


def _write(file: Path, text: str, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), mode)  # whatever the umask is
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _check_private(path: Path, cure: str) -> None:
    """KeyFileError if others than we can get at it. OSError if it is not there."""
    found = path.stat()
    if found.st_uid != os.getuid():
        raise KeyFileError(f"{path} belongs to somebody else (user {found.st_uid}); keys must be ours")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise KeyFileError(f"others can read {path} (mode {stat.S_IMODE(found.st_mode):o}): say `{cure} {path}`")
