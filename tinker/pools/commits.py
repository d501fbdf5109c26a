"""What an update worker has committed: per policy a row of numbered commits, each there as a whole or not at all.

A commit holds a policy's training state, the learner's numbers that belong to it, and the results of the operations that made it, so that
whoever goes on from it goes on as if nothing had happened, and does nothing twice. A number is written once: of two workers that hold the
same policy, the one that comes second is told (`Superseded`) and must go on from the other's commit. Whoever takes a policy over writes a
commit first, so that a worker that was thought dead cannot commit any more.

On disk a commit is one file: a line of JSON (names, sizes, digest), then the contents; written beside, synced, and linked under its number.
Several task servers may share the directory if its file system has hard links.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from tinker.protocol.values import PolicyName, RunId

Contents = Mapping[str, bytes]
KEPT = 2  # the newest good commit, and one more in case the disk damages it
SUFFIX = ".commit"
MAGIC = "opentinker commit 1"
log = structlog.get_logger("taskserver")


class Superseded(Exception):
    """Another worker has committed this number: what we hold of the policy is old."""


class CommitUnwritable(Exception):
    """The disk is full or refuses; the message names the path. Nothing was committed; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit `number` of a policy."""

    number: int
    files: Contents


class Commits(Protocol):
    """Where commits are kept."""

    def newest(self, policy: PolicyName) -> int:
        """The highest number there is, readable or not; 0: none."""

    def read(self, policy: PolicyName) -> Commit | None:
        """The newest commit that is whole; None: there is none. Damaged ones are named in the log and passed over."""

    def write(self, policy: PolicyName, number: int, files: Contents) -> None:
        """Commit `number` is on disk on return, and older ones that nobody needs are gone. Superseded, CommitUnwritable: it is not."""

    def forget(self, run: RunId) -> None:
        """The run is over: its policies need no commits any more."""


@dataclass(slots=True)
class MemoryCommits:
    """Commits that end with the process."""

    _kept: dict[PolicyName, Commit] = field(default_factory=dict)

    def newest(self, policy: PolicyName) -> int:
        return self._kept[policy].number if policy in self._kept else 0

    def read(self, policy: PolicyName) -> Commit | None:
        return self._kept.get(policy)

    def write(self, policy: PolicyName, number: int, files: Contents) -> None:
        if number != self.newest(policy) + 1:
            raise _superseded(policy, number, self.newest(policy))
        self._kept[policy] = Commit(number, dict(files))

    def forget(self, run: RunId) -> None:
        self._kept = {policy: each for policy, each in self._kept.items() if not policy.startswith(f"{run}/")}


class DiskCommits:
    """Commits in a directory, one below it for each policy. `CommitUnwritable` if it cannot be made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(directory, error) from error

    def newest(self, policy: PolicyName) -> int:
        return max(self._numbers(policy), default=0)

    def read(self, policy: PolicyName) -> Commit | None:
        for number in sorted(self._numbers(policy), reverse=True):
            path = self._path(policy, number)
            try:
                return Commit(number, _unpacked(path.read_bytes()))
            except FileNotFoundError:  # a newer one has replaced it meanwhile
                continue
            except (OSError, ValueError) as error:
                log.error("commit refused", path=str(path), why=str(error), then="the one before is used")
        return None

    def write(self, policy: PolicyName, number: int, files: Contents) -> None:
        path = self._path(policy, number)
        beside = path.with_name(f".{number:06d}.{os.getpid()}.part")
        try:
            path.parent.mkdir(exist_ok=True)
            if number != (newest := self.newest(policy)) + 1:
                raise _superseded(policy, number, newest)
            with beside.open("wb") as file:
                for piece in _packed(files):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.link(beside, path)  # unlike a rename it never replaces another worker's commit
            _sync(path.parent)
        except FileExistsError:
            raise _superseded(policy, number, self.newest(policy)) from None
        except OSError as error:
            raise _unwritable(path, error) from error
        finally:
            beside.unlink(missing_ok=True)
        self._prune(policy, number)

    def forget(self, run: RunId) -> None:
        for directory in self._directory.glob(f"{_plain(run)}=*"):
            shutil.rmtree(directory, ignore_errors=True)

    def _prune(self, policy: PolicyName, newest: int) -> None:
        for number in self._numbers(policy):
            if number <= newest - KEPT:
                self._path(policy, number).unlink(missing_ok=True)

    def _numbers(self, policy: PolicyName) -> list[int]:
        directory = self._path(policy, 0).parent
        paths = directory.glob(f"*{SUFFIX}") if directory.is_dir() else ()
        return [int(path.stem) for path in paths if path.stem.isdigit()]

    def _path(self, policy: PolicyName, number: int) -> Path:
        return self._directory / _plain(policy) / f"{number:06d}{SUFFIX}"


def _plain(name: str) -> str:
    """As one segment of a path, below our directory."""
    flat = name.replace("/", "=")
    if not flat.strip(".") or any(letter in flat for letter in "\\\0*?["):
        raise ValueError(f"{name!r} cannot name a directory of commits")
    return flat


def _packed(files: Contents) -> list[bytes]:
    digest = hashlib.sha256()
    for name in files:
        digest.update(files[name])
    sizes = {name: len(data) for name, data in files.items()}
    header = json.dumps({"kind": MAGIC, "sizes": sizes, "sha256": digest.hexdigest()})
    return [header.encode() + b"\n", *files.values()]


def _unpacked(data: bytes) -> dict[str, bytes]:
    """ValueError says what is wrong."""
    head, newline, rest = data.partition(b"\n")
    try:
        header = json.loads(head)
        kind, sizes, expected = header["kind"], dict(header["sizes"]), header["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"it does not begin as a commit does ({type(error).__name__})") from error
    if kind != MAGIC or not newline:
        raise ValueError(f"it is {kind!r}, expected {MAGIC!r}")
    if len(rest) != sum(sizes.values()):
        raise ValueError(f"it has {len(rest)} bytes of contents, expected {sum(sizes.values())}")
    if (found := hashlib.sha256(rest).hexdigest()) != expected:
        raise ValueError(f"its digest is {found[:12]}, expected {expected[:12]}")
    files, begin = {}, 0
    for name, size in sizes.items():
        files[name] = rest[begin : begin + size]
        begin += size
    return files


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _superseded(policy: PolicyName, number: int, newest: int) -> Superseded:
    return Superseded(
        f"commit {number} of {policy} cannot be written, the newest is {newest}: another worker has taken it over"
    )


def _unwritable(path: Path, error: OSError) -> CommitUnwritable:
    return CommitUnwritable(
        f"cannot commit to {path}: {error.strerror or error}; free some space or make it writable, and it goes on"
    )
