"""The coordinator's journal: every input of the core, so that folding them gives the same states and messages, byte for byte (I8).

An entry is one call of the core: what kind, when, from whom, with which message, and a digest of what it returned. Arrays are stubs
(`coordinator.app.arrays`). An entry is written before what it caused leaves. What is on disk (fsync) before that: everything whose loss
would make peers know more than a coordinator that restarts after the machine has failed: `Admitted`, `Opened`, `MayUpdate`,
`UpdateEnded`, `OperationDone` and `OperationFailed` (an operation has one outcome), `Load` (a version is published), `Play`
(a group is at one host), `RunStopped`, and
every restart with its epoch. Turns are not: a turn that is lost is opened again. One burst of messages is one write and at most one fsync.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from coordinator.core.coordinator import RULES, Coordinator
from coordinator.core.run import Sends
from tinker.protocol import ToCoordinator
from tinker.protocol.to_coordinator import Hello
from tinker.protocol.to_host import (
    Admitted,
    MayUpdate,
    Opened,
    OperationDone,
    OperationFailed,
    Play,
    RunStopped,
    UpdateEnded,
)
from tinker.protocol.to_taskserver import Load
from tinker.protocol.values import PeerName
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.journal import Journal, JournalDamaged, Segment, prune
from tinker.runtime.plain import PlainError, from_text, to_text

DURABLE = frozenset({Admitted, Opened, MayUpdate, UpdateEnded, OperationDone, OperationFailed, Load, RunStopped, Play})
SEGMENT = 20_000  # entries of one segment; folding them is what a restart takes
NOBODY = PeerName("")
SEGMENT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One input of the core. `number` counts within the segment. `kind`: join, step, part, lose, tick, drain, close or restart.
    `message`: as it travels, with stubs; `note`: a reason, or the lease; `epoch`: of a restart. `effects`: digest of what the core
    returned."""

    number: int
    now: float
    kind: str
    peer: PeerName
    message: bytes
    note: str
    epoch: int
    effects: bytes


def digest(sends: Sends) -> bytes:
    """Of everything that was said, and to whom."""
    if not sends:
        return b""
    running = hashlib.blake2b(digest_size=8)
    for name, message in sends:
        data = encode(message)
        running.update(b"%d %d " % (len(name.encode()), len(data)))
        running.update(name.encode())
        running.update(data)
    return running.digest()


def apply(core: Coordinator, entry: Entry) -> Sends:
    """Give the core this input."""
    match entry.kind:
        case "step":
            return core.step(entry.peer, decode(entry.message, ToCoordinator), entry.now)
        case "join":
            return core.join(decode(entry.message, Hello), entry.now)
        case "part":
            return core.part(entry.peer, entry.now)
        case "lose":
            return core.lose(entry.peer, entry.note, entry.now)
        case "tick":
            return core.tick(entry.now)
        case "drain":
            return core.drain(entry.note)
        case "close":
            return core.close()
        case "restart":
            return core.restart(entry.epoch, entry.now, float(entry.note))
    raise ValueError(f"an entry of kind {entry.kind!r}")


def snapshot(core: Coordinator) -> bytes:
    """The whole state."""
    return to_text(core, Coordinator).encode()


def restore(core: Coordinator, state: bytes) -> None:
    """Put the core into this state. PlainError if it is none."""
    made = from_text(state.decode(), Coordinator)
    for each in fields(Coordinator):
        setattr(core, each.name, getattr(made, each.name))
    core.turns.counts = core.counts


def entries(segment: Segment) -> Iterable[tuple[int, Entry]]:
    """Its entries, each with its offset in the file. JournalDamaged if a record is none, or one is missing."""
    for number, (at, record) in enumerate(segment.records):
        try:
            entry: Entry = decode(record, Entry)
        except WireError as error:
            raise JournalDamaged(f"{segment.path}, offset {at}: this is no entry: {error}") from error
        if entry.number != number:
            raise JournalDamaged(f"{segment.path}, offset {at}: entry {entry.number}, expected was {number}")
        yield at, entry


class Diverged(JournalDamaged):
    """Folding gives something else than what was recorded; the message names the first entry."""


def fold(core: Coordinator, segment: Segment) -> None:
    """Bring the core to where the segment ends. Diverged if it says something else on the way than it said then."""
    try:
        restore(core, segment.snapshot)
    except PlainError as error:
        raise JournalDamaged(f"{segment.path}: the snapshot cannot be read: {error}") from error
    for at, entry in entries(segment):
        if digest(apply(core, entry)) != entry.effects:
            raise Diverged(
                f"{segment.path}, offset {at}: entry {entry.number} ({entry.kind} {entry.peer}) has other effects than were recorded; "
                "run the version that wrote the journal, and report this"
            )


@dataclass(slots=True)
class Recorder:
    """The core behind its journal: the same calls; what they return may leave after `commit`. `journal` None: nothing is kept.
    `segments`: how many stay, the newest included (0: all)."""

    core: Coordinator
    journal: Journal | None = None
    _number: int = 0
    _waiting: list[bytes] = field(default_factory=list)
    _durable: bool = False
    segments: int = 0

    def join(self, hello: Hello, now: float) -> Sends:
        """MemberRefused as the core says it; then there is no entry."""
        return self._keep(self.core.join(hello, now), now, "join", hello.name, message=hello)

    def step(self, peer: PeerName, message: ToCoordinator, now: float) -> Sends:
        sends = self.core.step(peer, message, now)
        return sends if self.journal is None else self._keep(sends, now, "step", peer, message=message)

    def part(self, peer: PeerName, now: float) -> Sends:
        return self._keep(self.core.part(peer, now), now, "part", peer)

    def lose(self, peer: PeerName, reason: str, now: float) -> Sends:
        return self._keep(self.core.lose(peer, reason, now), now, "lose", peer, note=reason)

    def tick(self, now: float) -> Sends:
        return self._keep(self.core.tick(now), now, "tick")

    def drain(self, reason: str, now: float) -> Sends:
        return self._keep(self.core.drain(reason), now, "drain", note=reason)

    def close(self, now: float) -> Sends:
        return self._keep(self.core.close(), now, "close")

    def restart(self, epoch: int, now: float, lease: float) -> Sends:
        self._durable = True
        return self._keep(self.core.restart(epoch, now, lease), now, "restart", note=repr(lease), epoch=epoch)

    def commit(self) -> None:
        """Write what happened since the last time. JournalError: nothing of it is written, and it is tried again the next time."""
        if self.journal is None or not self._waiting:
            return
        self.journal.append(self._waiting, durable=self._durable)
        self._waiting, self._durable = [], False
        if self.journal.records >= SEGMENT or self.journal.bytes >= SEGMENT_BYTES:
            self.journal.begin(snapshot(self.core), self.core.epoch)
            self._number = 0
            self._prune()

    def _prune(self) -> None:
        """The newest segment is on disk as a whole and is all that a restart needs, so the oldest ones may go."""
        if self.journal is not None and self.segments:
            with suppress(OSError):  # what cannot be removed is tried again with the next one
                prune(self.journal.directory, self.segments)

    def _keep(
        self,
        sends: Sends,
        now: float,
        kind: str,
        peer: PeerName = NOBODY,
        *,
        message: object = None,
        note: str = "",
        epoch: int = 0,
    ) -> Sends:
        if self.journal is not None:
            data = b"" if message is None else encode(message)
            self._waiting.append(encode(Entry(self._number, now, kind, peer, data, note, epoch, digest(sends))))
            self._number += 1
            self._durable = self._durable or any(type(each) in DURABLE for _, each in sends)
        return sends


def open_journal(directory: Path, core: Coordinator, now: float, segments: int = 0) -> Recorder:
    """Open or begin the journal there. The core, which must be new, becomes what the journal leads to, one epoch later. JournalError or
    JournalDamaged if that cannot be."""
    journal = Journal(directory, RULES)
    try:
        if journal.newest is None:
            journal.begin(snapshot(core), core.epoch)
            return Recorder(core, journal, segments=segments)
        lease = core.lease  # it may be started again with another one
        fold(core, journal.newest)
        epoch = max(journal.epoch, core.epoch) + 1
        journal.begin(snapshot(core), epoch)
        recorder = Recorder(core, journal, segments=segments)
        recorder.restart(epoch, now, lease)
        recorder.commit()
        recorder._prune()
        return recorder
    except BaseException:
        journal.close()
        raise
