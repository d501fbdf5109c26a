"""The coordinator's disk in the simulation: the real journal writes to it, and it forgets what a real one may forget.

What was written survives the process; what was synced survives the machine, and so does a new name once its directory was synced. Of what
was not, any part may be left: a torn tail, an old directory. A crash may come inside a write, before, in the middle of or after its bytes;
then nothing more of that process reaches the disk.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any
from unittest import mock

from coordinator.app import journal as of_coordinator
from tinker.runtime import journal as of_disk

SEGMENT = 120  # entries of a segment: in the life of one run several begin
DIRECTORY = "journal"


@dataclass
class SimFile:
    """`synced`: its bytes when it was last synced."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class JournalDisk:
    """`names`: the directory; `kept`: as it was when it was last synced. `crash`: kills the process at its next write; `written`: the
    share of that write which is kept. `dead`: the process that had it open is gone, and nothing of it arrives any more."""

    rng: random.Random
    names: dict[str, SimFile] = field(default_factory=dict)
    kept: dict[str, SimFile] = field(default_factory=dict)
    tokenizers: dict[bytes, bytes] = field(default_factory=dict)
    full: bool = False
    dead: bool = False
    crash: Callable[[], None] | None = None
    written: float = 0.0
    did: Counter[str] = field(default_factory=Counter)
    open_files: dict[int, SimFile | None] = field(default_factory=dict)  # None: the directory

    @property
    def path(self) -> SimPath:
        return SimPath(self, DIRECTORY)

    def fail_machine(self) -> None:
        """What was not synced is gone, or not: any part of a tail, and the old or the new directory."""
        if self.names.keys() != self.kept.keys() and self.rng.random() < 0.7:
            self.did["journal: names lost with the machine"] += 1
            self.names = dict(self.kept)
        for file in self.names.values():
            loose = len(file.data) - len(file.synced)
            if loose > 0:
                self.did["journal: tails lost with the machine"] += 1
                del file.data[len(file.synced) + self.rng.choice((0, 0, self.rng.randrange(loose))) :]
            elif loose < 0:
                file.data[:] = file.synced

    # --- what `os` does ---

    def open(self, path: SimPath, flags: int, mode: int = 0) -> int:
        number = len(self.open_files) + 3
        if path.name == DIRECTORY:
            self.open_files[number] = None
        elif self.dead:
            self.open_files[number] = SimFile()
        else:
            self._check()
            file = self.names.setdefault(path.name, SimFile())
            if flags & os.O_TRUNC:
                file.data.clear()
            self.open_files[number] = file
        return number

    def write(self, number: int, data: bytes | memoryview) -> int:
        if self.dead:
            return len(data)
        self._check()
        file = self.open_files[number]
        assert file is not None
        crash, self.crash = self.crash, None
        if crash is None:
            file.data += data
            return len(data)
        file.data += data[: int(self.written * len(data))]
        self.dead = True
        crash()
        return len(data)

    def sync(self, number: int) -> None:
        file = self.open_files[number]
        if self.dead:
            return
        if file is None:
            self.kept = dict(self.names)
        else:
            file.synced = bytes(file.data)

    def truncate(self, number: int, size: int) -> None:
        file = self.open_files[number]
        if not self.dead and file is not None:
            del file.data[size:]

    def _check(self) -> None:
        if self.full:
            self.did["refused by a full journal disk"] += 1
            raise OSError(errno.ENOSPC, "no space left on device")


@dataclass(frozen=True, order=True)
class SimPath:
    """A name on that disk, as far as the journal uses one."""

    disk: JournalDisk = field(compare=False, repr=False)
    name: str

    def __str__(self) -> str:
        return f"/{self.name}"

    def __truediv__(self, name: str) -> SimPath:
        return SimPath(self.disk, name)

    def with_suffix(self, suffix: str) -> SimPath:
        return SimPath(self.disk, self.name.rpartition(".")[0] + suffix)

    def glob(self, pattern: str) -> list[SimPath]:
        return [SimPath(self.disk, name) for name in sorted(self.disk.names) if fnmatch(name, pattern)]

    def read_bytes(self) -> bytes:
        return bytes(self.disk.names[self.name].data)

    def rename(self, to: SimPath) -> None:
        if not self.disk.dead:
            self.disk.names[to.name] = self.disk.names.pop(self.name)

    def unlink(self, missing_ok: bool = False) -> None:
        if not self.disk.dead:
            self.disk.names.pop(self.name, None)

    def open(self, mode: str) -> SimHandle:
        return SimHandle(self.disk, self.disk.open(self, 0))


@dataclass
class SimHandle:
    """An open file object."""

    disk: JournalDisk
    number: int

    def __enter__(self) -> SimHandle:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def truncate(self, size: int) -> None:
        self.disk.truncate(self.number, size)

    def fileno(self) -> int:
        return self.number


class SimOs:
    """`os`, as far as the journal uses it, on this disk."""

    def __init__(self, disk: JournalDisk) -> None:
        self.open, self.write, self.fsync, self.fdatasync = disk.open, disk.write, disk.sync, disk.sync
        self.ftruncate = disk.truncate

    def close(self, number: int) -> None:
        """The number is never used again."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("O_"):
            raise AttributeError(f"the simulated disk knows no os.{name}")
        return getattr(os, name)


class SimLock:
    """Whoever had it is dead."""

    def release(self) -> None:
        """Nobody waits for it."""


@contextmanager
def simulated_journal(disk: JournalDisk) -> Iterator[None]:
    """While it is entered, the journal is on this disk."""
    with (
        mock.patch.object(of_disk, "os", SimOs(disk)),
        mock.patch.object(of_disk, "_locked", lambda directory: SimLock()),
        mock.patch.object(of_coordinator, "SEGMENT", SEGMENT),
    ):
        yield
