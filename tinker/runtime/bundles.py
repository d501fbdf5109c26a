"""Bundles of named files on disk: written beside, fsynced, renamed, and known by the digest of all their names and contents.

A bundle is a directory of plain files below the store's own directory. It is there as a whole or not at all, and never changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Protocol

import psutil

from tinker.protocol.to_bulk import FileSize
from tinker.protocol.values import BlobRef

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@=+-]{0,199}")  # one path segment, never hidden, never a parent
_INCOMING = ".incoming-"


class BulkError(Exception):
    """Base of what goes wrong with bundles. Nothing was stored."""


class BundleExists(BulkError):
    """The name is taken by a bundle with other contents."""


class BundleCorrupt(BulkError):
    """The contents do not have the digest they should have."""


class StoreUnwritable(BulkError):
    """The disk is full or refuses: an operator must act; the same call may succeed then."""


@cache
def machine_id() -> str:
    """The same for every process of this machine until it boots again: host name and a digest of the boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    since = boot.read_text() if boot.exists() else str(int(psutil.boot_time()))
    return f"{socket.gethostname()}-{hashlib.sha256(since.encode()).hexdigest()[:12]}"


def digest_of(files: Mapping[str, bytes]) -> str:
    """sha256 over the sorted names with their lengths and contents."""
    running = BundleDigest()
    for name in sorted(files):
        running.begin(name, len(files[name]))
        running.add(files[name])
    return running.hex()


class BundleDigest:
    """The same, piece by piece: files in the order of their names."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def begin(self, name: str, size: int) -> None:
        self._hash.update(f"{len(name.encode())}:{name}:{size}:".encode())

    def add(self, data: bytes | memoryview) -> None:
        self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


def check_name(name: str) -> str:
    """The name, if it can be a bundle's or a file's; BulkError else, so that no name leads out of the store."""
    if not _NAME.fullmatch(name):
        raise BulkError(
            f"{name!r:.100} cannot name a bundle or a file: expected letters, digits, '_.@=+-', not beginning with a dot"
        )
    return name


def read_bundle(ref: BlobRef) -> dict[str, bytes]:
    """The files at `ref.path`, verified. BundleCorrupt if they are not what `ref` says."""
    directory = Path(ref.path)
    try:
        size = sum(path.stat().st_size for path in _files(directory))
        if size != ref.size:
            raise BundleCorrupt(f"bundle {ref.name} at {directory} has {size} bytes, expected {ref.size}")
        files = {path.name: path.read_bytes() for path in _files(directory)}
    except OSError as error:
        raise BulkError(f"cannot read bundle {ref.name} at {directory}: {error}") from error
    check_digest(ref.name, digest_of(files), ref.digest)
    return files


def check_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise BundleCorrupt(
            f"bundle {name} is corrupt: its digest is {found[:12]}, expected {expected[:12]}; make or fetch it again"
        )


class Writer(Protocol):
    """A bundle that is being written: files one after the other, sorted by name."""

    def begin(self, name: str, size: int) -> None: ...

    def add(self, data: bytes | memoryview) -> None: ...


class BundleStore:
    """The bundles below one directory. `endpoint` is where a BulkServer serves them ("": nowhere). All calls block on the disk.

    Many processes may share a directory. Half-written bundles of processes that died are removed when a store is opened.
    """

    def __init__(self, directory: Path, endpoint: str = "", machine: str = "") -> None:
        self.directory = Path(directory).absolute()
        self.endpoint = endpoint
        self.machine = machine or machine_id()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnwritable(f"cannot make the bundle store {self.directory}: {error}") from error
        self._sweep()

    def put(self, name: str, files: Mapping[str, bytes]) -> BlobRef:
        """Store the files. An existing bundle of that name with the same contents is fine, with others it is BundleExists."""
        digest = digest_of(files)
        size = sum(map(len, files.values()))
        existing = self.existing(name, digest)
        if existing is not None:
            return existing
        incoming = self.incoming(name, digest, size)
        try:
            for file in sorted(files):
                incoming.begin(file, len(files[file]))
                incoming.add(files[file])
            return incoming.commit()
        finally:
            incoming.discard()

    def incoming(self, name: str, digest: str, size: int) -> IncomingBundle:
        """A bundle to be written piece by piece. Commit or discard it."""
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise StoreUnwritable(f"no room for bundle {name} in {self.directory}: {size} bytes needed, {free} free")
        return IncomingBundle(self, check_name(name), digest, size)

    def existing(self, name: str, digest: str) -> BlobRef | None:
        """The stored bundle of that name, if it has this digest; None: there is none. BundleExists if it has another."""
        directory = self.directory / check_name(name)
        if not directory.is_dir():
            return None
        found = _digest_on_disk(directory)
        if found != digest:
            raise BundleExists(
                f"{directory} holds another bundle (digest {found[:12]}, not {digest[:12]}): choose a new name"
            )
        return self.ref(name, digest, sum(path.stat().st_size for path in _files(directory)))

    def listing(self, name: str) -> tuple[FileSize, ...]:
        """The files of a stored bundle, sorted by name."""
        directory = self.directory / check_name(name)
        if not directory.is_dir():
            raise BulkError(f"there is no bundle {name} in {self.directory}")
        return tuple(FileSize(path.name, path.stat().st_size) for path in _files(directory))

    def read(self, ref: BlobRef) -> dict[str, bytes]:
        """The files of a bundle of this store, verified."""
        return read_bundle(self.ref(check_name(ref.name), ref.digest, ref.size))

    def remove(self, name: str) -> None:
        """Forget a bundle. An unknown name is ignored."""
        directory = self.directory / check_name(name)
        gone = self.directory / f"{_INCOMING}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            directory.rename(gone)  # nobody ever sees half of it
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def remove_beginning(self, prefix: str) -> None:
        """Forget every bundle whose name begins so."""
        check_name(prefix)
        for directory in sorted(self.directory.iterdir()):
            if directory.name.startswith(prefix):
                self.remove(directory.name)

    def ref(self, name: str, digest: str, size: int) -> BlobRef:
        return BlobRef(name, digest, size, self.machine, str(self.directory / name), self.endpoint)

    def _sweep(self) -> None:
        for path in sorted(self.directory.glob(f"{_INCOMING}*")):
            pid = path.name.removeprefix(_INCOMING).partition("-")[0]
            if not (pid.isdigit() and psutil.pid_exists(int(pid))):
                shutil.rmtree(path, ignore_errors=True)


class IncomingBundle:
    """One bundle on its way into a store: a hidden directory until `commit`."""

    def __init__(self, store: BundleStore, name: str, digest: str, size: int) -> None:
        self._store = store
        self._name = name
        self._expected = digest
        self._size = size
        self._digest = BundleDigest()
        self._file: IO[bytes] | None = None
        self._directory = store.directory / f"{_INCOMING}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._directory.mkdir()
        except OSError as error:
            raise self._unwritable(error) from error

    def begin(self, name: str, size: int) -> None:
        try:
            self._close()
            self._file = (self._directory / check_name(name)).open("xb")
        except OSError as error:
            raise self._unwritable(error) from error
        self._digest.begin(name, size)

    def add(self, data: bytes | memoryview) -> None:
        assert self._file is not None, "begin a file first"
        try:
            self._file.write(data)
        except OSError as error:
            raise self._unwritable(error) from error
        self._digest.add(data)

    def commit(self) -> BlobRef:
        """Verify, and make it visible under its name. If somebody else was first with the same contents, theirs is kept."""
        try:
            self._close()
            check_digest(self._name, self._digest.hex(), self._expected)
            for path in [*_files(self._directory), self._directory]:
                _fsync(path)
            self._directory.rename(self._store.directory / self._name)
            _fsync(self._store.directory)
        except OSError as error:
            existing = self._store.existing(self._name, self._expected)
            if existing is None:
                raise self._unwritable(error) from error
            return existing
        return self._store.ref(self._name, self._expected, self._size)

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # closing may still try to write, and the disk is full
                file.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _unwritable(self, error: OSError) -> StoreUnwritable:
        return StoreUnwritable(
            f"cannot write bundle {self._name} to {self._store.directory}: {error.strerror or error}"
        )


def _files(directory: Path) -> Iterable[Path]:
    """A bundle's files, sorted by name. Nothing else may be in there."""
    paths = sorted(directory.iterdir(), key=lambda path: path.name)
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise BundleCorrupt(f"{path} is no plain file, so {directory} is no bundle")
    return paths


def _digest_on_disk(directory: Path) -> str:
    """Without reading a whole file into memory."""
    running = BundleDigest()
    for path in _files(directory):
        running.begin(path.name, path.stat().st_size)
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                running.add(data)
    return running.hex()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
