"""The coordinator's disk in the simulation: the journal's promises in memory, with crashes at the very write and a machine that fails.

`Journal` promises that what was appended survives the process, and what was durable survives the machine. A crash may come before a write,
or between the write and what it lets leave: the simulation kills the process inside `append`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinker.runtime.journal import JournalError, Segment


@dataclass
class JournalDisk:
    """What outlives a coordinator. `crash`: kills the process that writes next; `written`: whether its write is kept."""

    segments: list[Segment] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)  # of the newest segment
    durable: int = 0  # how many of them have reached the disk
    tokenizers: dict[bytes, bytes] = field(default_factory=dict)
    full: bool = False
    crash: Callable[[], None] | None = None
    written: bool = False
    refused: int = 0

    def lose_unsynced(self) -> int:
        """The machine failed; how many records are gone."""
        lost = len(self.records) - self.durable
        del self.records[self.durable :]
        return lost


class SimJournal:
    """See the module and `Journal`."""

    def __init__(self, disk: JournalDisk, rules: int) -> None:
        self.rules = rules
        self.records = 0
        self.bytes = 0
        self._disk = disk
        self.repaired = ""
        self.newest = self.read() if disk.segments else None
        self.epoch = self.newest.epoch if self.newest else 0
        self.number = len(disk.segments)

    def read(self) -> Segment:
        """The newest segment as it lies there."""
        last = self._disk.segments[-1]
        records = tuple(enumerate(self._disk.records))
        return Segment(last.path, last.rules, last.epoch, last.number, last.snapshot, records, len(records))

    def begin(self, snapshot: bytes, epoch: int) -> Path:
        self._check()
        self.number += 1
        path = Path(f"{self.number:08d}.journal")
        self._disk.segments.append(Segment(path, self.rules, epoch, self.number, snapshot, (), 0))
        self._disk.records.clear()
        self._disk.durable = 0
        self.epoch, self.records, self.bytes = epoch, 0, 0
        return path

    def append(self, records: Sequence[bytes], *, durable: bool) -> None:
        self._check()
        crash, self._disk.crash = self._disk.crash, None
        if crash is None or self._disk.written:
            self._disk.records += records
            self.records += len(records)
        if durable:
            self._disk.durable = len(self._disk.records)
        if crash is not None:
            crash()

    def close(self) -> None:
        """Nothing is open."""

    def _check(self) -> None:
        if self._disk.full:
            self._disk.refused += 1
            raise JournalError("the journal's disk is full; make room")
