"""The run directory: everything a run leaves on disk, complete or not there at all.

    config.toml     the resolved configuration            exit.json     why the run ended (missing: it still runs, or was killed)
    metrics.jsonl   one JSON object per (round, agent)    summary.md, curves.png, report.html
    timeline.jsonl  what took how long (`coordinator.app.timeline`)
    checkpoints/    what it takes to go on (`coordinator.app.checkpoints`)
    adapters/<agent>/v000012/, adapters/<agent>/final     recordings/rollout-0001.jsonl

Files are written beside, fsynced and renamed. `metrics.jsonl` is appended to, one write and fsync per call; a write that fails is
taken back. Every OSError becomes a RunDirectoryError that names the path and what to do; what was finished before stays.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from errno import EACCES, EDQUOT, EEXIST, EFBIG, ENOSPC, ENOTDIR, EPERM, EROFS
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tinker.pools.commits import CommitUnwritable, DiskCommits
from tinker.protocol.values import PolicyName

FIRST_KEYS = ("round", "agent", "reward_mean", "reward_std")
RUNS = Path("runs")
ROUNDS = PolicyName("rounds")  # what checkpoints are kept under

_SPACE = "free some space or choose another place with --out; everything finished so far is kept"
_ACCESS = "make it writable for this user or choose another place with --out"
_REMEDIES = {
    ENOSPC: _SPACE,
    EDQUOT: _SPACE,
    EFBIG: "raise the limit of the file size (ulimit -f); everything finished so far is kept",
    EACCES: _ACCESS,
    EPERM: _ACCESS,
    EROFS: _ACCESS,
    ENOTDIR: "a file stands where a directory is needed: remove it or choose another place with --out",
    EEXIST: "a file stands where a directory is needed: remove it or choose another place with --out",
}


class RunDirectoryError(Exception):
    """The run cannot leave its work there. The message names the path, what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Why the run ended: `reason` in one word (finished, stopped, failed, ...), the exit code of the process, and more in words."""

    reason: str
    code: int
    detail: str = ""


class RunDirectory:
    """One run's directory. Not for two writers: `create` claims it, and a second `create` of the same path is refused."""

    def __init__(self, path: Path) -> None:
        """For `create` and `reopen` only: `path` holds a `metrics.jsonl`. RunDirectoryError if another process writes there."""
        self.path = path
        with blamed(path):
            lock = os.open(self.metrics, os.O_RDONLY)
        self._let_go = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"{path} is being written by another process: wait until that run is over"
            ) from None
        except OSError:  # a file system without locks
            pass

    @classmethod
    def create(cls, path: Path | None, scenario: str, config_text: str, *, now: datetime | None = None) -> RunDirectory:
        """Make the directory, claim it, and write `config.toml`. `path` None: `runs/<scenario>-<YYYYmmdd-HHMMSS>`.

        RunDirectoryError if it already holds a run or cannot be written.
        """
        path = path if path is not None else _unused(scenario, now or datetime.now())
        with blamed(path):
            path.mkdir(parents=True, exist_ok=True)
            try:
                (path / "metrics.jsonl").touch(exist_ok=False)
            except FileExistsError:
                raise RunDirectoryError(
                    f"{path} already holds a run (metrics.jsonl is there); choose another place with --out, or move it away"
                ) from None
        directory = cls(path)
        try:
            directory.write_text("config.toml", config_text)
        except RunDirectoryError:
            directory.metrics.unlink(missing_ok=True)
            raise
        return directory

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Claim the directory of a run that has stopped. RunDirectoryError if it holds none, or it still runs."""
        if not (path / "metrics.jsonl").is_file() or not (path / "config.toml").is_file():
            raise RunDirectoryError(f"{path} holds no run (metrics.jsonl and config.toml are not both there)")
        return cls(path)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Add rows to `metrics.jsonl`, all of them or none, and have them on disk on return. NaN and infinities become null."""
        data = "".join(json.dumps(_ordered(row), allow_nan=False) + "\n" for row in rows).encode()
        with blamed(self.metrics), self.metrics.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                os.truncate(self.metrics, size)
                raise

    @property
    def written(self) -> int:
        """Bytes of `metrics.jsonl` so far."""
        with blamed(self.metrics):
            return self.metrics.stat().st_size

    def save_adapter(self, agent: str, version: int, files: Mapping[str, bytes]) -> Path:
        """Keep one version of an agent's adapter and let `final` name the newest one kept. Returns the version's directory.

        A version never changes: saving the same bytes again is fine, other bytes are refused.
        """
        home = self.path / "adapters" / _plain(agent)
        target = home / f"v{version:06d}"
        with blamed(target):
            if target.exists():
                if _contents(target) != dict(files):
                    raise RunDirectoryError(
                        f"{target} holds other bytes already, and a version never changes: use a new version"
                    )
            else:
                _write_directory(target, files)
            self.point_to_newest(home)
        return target

    def point_to_newest(self, home: Path) -> None:
        """Let `final` name the newest version below `home`; without one it goes."""
        with blamed(home):
            versions = [each for each in home.iterdir() if re.fullmatch(r"v\d{6,}", each.name)]
            if versions:
                _point(home / "final", max(versions, key=lambda each: int(each.name[1:])))
            elif (home / "final").is_symlink():
                (home / "final").unlink()
            else:
                shutil.rmtree(home / "final", ignore_errors=True)

    def save_checkpoint(self, files: Mapping[str, bytes]) -> None:
        """Keep these as the newest checkpoint; the one before stays, too. On disk on return, as a whole."""
        try:
            commits = DiskCommits(self.path / "checkpoints")
            commits.write(ROUNDS, commits.newest(ROUNDS) + 1, files)
        except CommitUnwritable as error:
            raise RunDirectoryError(str(error)) from error

    def newest_checkpoint(self) -> Mapping[str, bytes] | None:
        """The newest that is whole; None: there is none."""
        try:
            commit = DiskCommits(self.path / "checkpoints").read(ROUNDS)
        except CommitUnwritable as error:
            raise RunDirectoryError(str(error)) from error
        return commit.files if commit else None

    def recordings_path(self, phase: str, round: int) -> Path:
        """Where the recordings of this phase belong; the directory is there on return, the file is the caller's to write."""
        path = self.path / "recordings" / f"{_plain(phase)}-{round:04d}.jsonl"
        with blamed(path):
            path.parent.mkdir(exist_ok=True)
        return path

    def write_text(self, name: str, text: str) -> Path:
        """Write (or replace) a file of the run directory."""
        return self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write (or replace) a file of the run directory."""
        path = self.path / _plain(name)
        write_file(path, data)
        return path

    def finish(self, exit: Exit) -> Path:
        """Say why the run ended, in `exit.json`, and let the directory go. Whoever finds this file finds a run that is over."""
        try:
            return self.write_text("exit.json", json.dumps(asdict(exit), indent=2) + "\n")
        finally:
            self._let_go()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl` (or of the run directory it is in). A torn last line is left out.

    RunDirectoryError if the file cannot be read or another line is damaged.
    """
    path = path / "metrics.jsonl" if path.is_dir() else path
    with blamed(path):
        lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            if number == len(lines):
                break
            raise RunDirectoryError(
                f"{path}, line {number} is damaged ({error}); delete that line to read the rest"
            ) from error
        rows.append(row)
    return rows


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """For whoever writes into a run directory: OSErrors become a RunDirectoryError with the path and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the path or choose another place with --out")
        raise RunDirectoryError(f"cannot use {error.filename or path}: {error.strerror or error}; {remedy}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write (or replace) a file: whole, or as it was before. RunDirectoryError if it cannot be written."""
    with blamed(path):
        _write_file(path, data)


def _unused(scenario: str, now: datetime) -> Path:
    """The default place; a run that began in the same second gets a number after it."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", re.split(r"[/\\:]", scenario)[-1]).strip("-.") or "run"
    first = RUNS / f"{name}-{now:%Y%m%d-%H%M%S}"
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def _plain(name: str) -> str:
    if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        raise RunDirectoryError(f"{name!r} is no plain file name; expected one without slashes")
    return name


def _ordered(row: Mapping[str, object]) -> dict[str, object]:
    keys = [key for key in FIRST_KEYS if key in row] + [key for key in row if key not in FIRST_KEYS]
    return {key: _jsonable(row[key]) for key in keys}


def _jsonable(value: object) -> object:
    """What JSON can say of a value: numbers of any library, NaN and infinities as null, everything else as its text."""
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): _jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [_jsonable(each) for each in value]
    return str(value)


def _write_file(path: Path, data: bytes) -> None:
    """Beside it first, fsynced, then renamed. On an error nothing of it is left, and an older `path` is as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _write_directory(path: Path, files: Mapping[str, bytes]) -> None:
    """Like `_write_file`, for a directory that does not exist yet."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        for name, data in files.items():
            _write_file(beside / _plain(name), data)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _sync_directory(path.parent)


def _point(final: Path, target: Path) -> None:
    """Let `final` be `target`: a relative link, or a copy where the file system has no links."""
    beside = final.with_name(f".{final.name}.{os.getpid()}.part")
    beside.unlink(missing_ok=True)
    try:
        beside.symlink_to(target.name, target_is_directory=True)
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
            raise
        _point_by_copy(final, target)
    else:
        beside.replace(final)
        _sync_directory(final.parent)


def _point_by_copy(final: Path, target: Path) -> None:
    fresh, old = final.with_name(".final.new"), final.with_name(".final.old")
    for each in (fresh, old):
        shutil.rmtree(each, ignore_errors=True)
    _write_directory(fresh, _contents(target))
    if final.exists():
        final.rename(old)
    fresh.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _contents(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(directory.iterdir())}


def _sync_directory(path: Path) -> None:
    """Have the renames in it on disk; a file system that cannot sync a directory is left alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise
    finally:
        os.close(descriptor)
