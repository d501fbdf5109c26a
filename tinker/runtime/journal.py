"""An append-only log of records in a directory: segments that begin with a snapshot, framed by length and checksum.

A segment is one file. It begins with a header (format, rules version, epoch, its number) and a first record, the snapshot: the state that
everything before the segment led to ("": nothing was before). So the newest segment alone is enough to go on, and older ones may be pruned.

What is promised: `append` writes all of its records or, when the disk refuses, none (JournalError; what was written is taken back). With
`durable` they have reached the disk when it returns; without, they survive the death of this process, not of the machine. Opening repairs
a torn tail: a last record that was not written completely is cut off and named in `repaired`. Damage anywhere else is an error that names
the file and the offset. One process at a time may have a directory open; another one is told who has it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

FORMAT = 1
MAGIC = b"OTJL"
HEADER = struct.Struct("<4sHIQQI")  # magic, format, rules version, epoch, number, crc32 of these
FRAME = struct.Struct("<III")  # length and crc32 of the record, crc32 of these two
LARGEST = 64 * 1024 * 1024  # bytes of one record


class JournalError(Exception):
    """The journal cannot be written, read or opened; the message has the path and what to do. Nothing has changed."""


class JournalDamaged(JournalError):
    """A file is not what was written; the message has its name and the offset."""


class JournalInUse(JournalError):
    """Another process has this directory open."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the journal, read. `records`: those after the snapshot, each with its offset. `size`: bytes up to the last whole
    record; `torn`: what follows it ("": nothing)."""

    path: Path
    rules: int
    epoch: int
    number: int
    snapshot: bytes
    records: tuple[tuple[int, bytes], ...]
    size: int
    torn: str = ""


def segment_paths(directory: Path) -> list[Path]:
    """The files of the journal, oldest first."""
    return sorted(directory.glob("*.journal"))


def read_segment(path: Path, *, last: bool) -> Segment:
    """Read one file. JournalDamaged unless it is whole, or only the tail of the `last` one is torn."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}; make it readable for this user") from error
    if len(data) < HEADER.size:
        raise _damaged(path, 0, f"{len(data)} bytes are no header")
    magic, format, rules, epoch, number, check = HEADER.unpack_from(data)
    if magic != MAGIC or check != zlib.crc32(data[: HEADER.size - 4]):
        raise _damaged(path, 0, "the header does not have its checksum")
    if format != FORMAT:
        raise JournalError(
            f"{path} has format {format}, this version writes {FORMAT}; read it with the version that wrote it"
        )
    records, size, torn = _records(path, data, last)
    if not records:
        raise _damaged(path, HEADER.size, "the snapshot is missing")
    return Segment(path, rules, epoch, number, records[0][1], tuple(records[1:]), size, torn)


def _records(path: Path, data: bytes, last: bool) -> tuple[list[tuple[int, bytes]], int, str]:
    records: list[tuple[int, bytes]] = []
    at = HEADER.size
    while at < len(data):
        found = _record(data, at)
        if isinstance(found, bytes):
            records.append((at, found))
            at += FRAME.size + len(found)
            continue
        what, tail = found
        if not (last and tail):
            raise _damaged(path, at, what)
        return records, at, f"{path}: {what} at offset {at}; {len(data) - at} bytes were cut off"
    return records, at, ""


def _record(data: bytes, at: int) -> bytes | tuple[str, bool]:
    """The record there, or what is wrong with it and whether an interrupted write explains that."""
    if at + FRAME.size > len(data):
        return "the last record is cut off in its frame", True
    length, check, of_frame = FRAME.unpack_from(data, at)
    if of_frame != zlib.crc32(data[at : at + 8]) or length > LARGEST:
        return "a frame does not have its checksum", not any(
            data[at:]
        )  # a file may have grown before its bytes were written
    end = at + FRAME.size + length
    if end > len(data):
        return "the last record is cut off", True
    payload = data[at + FRAME.size : end]
    if zlib.crc32(payload) != check:
        return "a record does not have its checksum", end == len(data)
    return payload


def _damaged(path: Path, at: int, what: str) -> JournalDamaged:
    return JournalDamaged(
        f"{path} is damaged at offset {at}: {what}. This is no torn tail; restore the file from a copy, "
        "or move the whole directory away and begin a new journal (its runs are lost then)"
    )


class Journal:
    """See the module. `newest`: the segment that was the last one when this was opened (None: the directory was empty).
    `repaired`: what was cut off then. Use `begin` before the first `append`."""

    def __init__(self, directory: Path, rules: int) -> None:
        self.directory = directory
        self.rules = rules
        self.epoch = 0
        self.number = 0
        self.records = 0
        self.bytes = 0
        self._file = -1
        self._path = directory
        self._lock = _locked(directory)
        try:
            self.newest, self.repaired = self._repair()
        except BaseException:
            self.close()
            raise

    def _repair(self) -> tuple[Segment | None, str]:
        for leftover in self.directory.glob("*.part"):
            leftover.unlink()
        paths = segment_paths(self.directory)
        if not paths:
            return None, ""
        newest = read_segment(paths[-1], last=True)
        if newest.rules != self.rules:
            raise JournalError(
                f"{newest.path} was written under rules {newest.rules}, this version has rules {self.rules}: "
                "finish its runs with the version that wrote it, or begin another directory"
            )
        if newest.torn:
            with newest.path.open("r+b") as file:
                file.truncate(newest.size)
                os.fsync(file.fileno())
        self.number, self.epoch = newest.number, newest.epoch
        return newest, newest.torn

    def begin(self, snapshot: bytes, epoch: int) -> Path:
        """A new segment; it is on disk as a whole, or JournalError and the one before goes on."""
        number = self.number + 1
        path = self.directory / f"{number:08d}.journal"
        part = path.with_suffix(".part")
        header = HEADER.pack(MAGIC, FORMAT, self.rules, epoch, number, 0)[:-4]
        data = header + struct.pack("<I", zlib.crc32(header)) + framed(snapshot)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            try:
                _write(file, data)
                os.fsync(file)
                part.rename(path)
                _sync_directory(self.directory)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise self._refused(path, error) from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path = file, path
        self.number, self.epoch, self.records, self.bytes = number, epoch, 0, len(data)
        return path

    def append(self, records: Sequence[bytes], *, durable: bool) -> None:
        """Write them in one go. JournalError: none of them was written; the same call may succeed once there is room again."""
        if self._file < 0:
            raise JournalError(f"the journal in {self.directory} has no open segment; begin one first")
        data = b"".join(map(framed, records))
        try:
            _write(self._file, data)
            if durable:
                os.fdatasync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self.bytes)
            raise self._refused(self._path, error) from error
        self.bytes += len(data)
        self.records += len(records)

    def close(self) -> None:
        """What was appended is on disk then. Others may open the directory."""
        if self._file >= 0:
            with suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1
        self._lock.release()

    def _refused(self, path: Path, error: OSError) -> JournalError:
        return JournalError(
            f"cannot write {path}: {error.strerror or error}; make room or make it writable, nothing was lost"
        )


def framed(record: bytes) -> bytes:
    """The record as it stands in the file."""
    head = struct.pack("<II", len(record), zlib.crc32(record))
    return head + struct.pack("<I", zlib.crc32(head)) + record


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _locked(directory: Path) -> FileLock:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(directory / "lock", thread_local=False)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise JournalInUse(
            f"another coordinator has the journal {directory} open; stop it first, or use another directory"
        ) from error
    except OSError as error:
        raise JournalError(
            f"cannot open the journal {directory}: {error.strerror}; make it a writable directory"
        ) from error
    return lock


def _sync_directory(directory: Path) -> None:
    """So that a new name survives the machine."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def prune(directory: Path, keep: int = 1) -> list[Path]:
    """Remove the oldest segments and keep the newest ones, at least one; returns what was removed. A journal that is open may be pruned."""
    old = segment_paths(directory)[: -max(1, keep)]
    for path in old:
        path.unlink()
    return old


def read_journal(directory: Path) -> Iterator[Segment]:
    """Every segment, oldest first, without opening the journal for writing. A torn tail is left alone (`Segment.torn` names it)."""
    paths = segment_paths(directory)
    if not paths:
        raise JournalError(f"there is no journal in {directory}: expected files like 00000001.journal")
    for path in paths:
        yield read_segment(path, last=path == paths[-1])
