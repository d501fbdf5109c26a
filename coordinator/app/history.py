"""A journal read again: `check` proves that it still leads to the same states and messages, `show` says in lines what happened.

Both fold it through the core of this installation and write nothing, so they may look at the journal of a coordinator that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from coordinator.app.journal import Diverged, Entry, apply, digest, entries, restore, snapshot
from coordinator.core.coordinator import RULES, Coordinator
from coordinator.core.run import Sends
from tinker.protocol import ToCoordinator
from tinker.protocol.to_coordinator import Heartbeat, Hello
from tinker.protocol.values import PeerName
from tinker.runtime.codec import decode
from tinker.runtime.journal import JournalError, Segment, read_journal

COMPARED = 500  # entries between comparisons of whole states


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check` went through. `torn`: what the next start will cut off ("": nothing)."""

    segments: int
    entries: int
    epoch: int
    torn: str


def check(directory: Path) -> Checked:
    """Fold every segment twice: from its own snapshot, and from the first one through. Diverged names the first entry, or the first
    snapshot, at which the two, or what was recorded, differ."""
    through: Coordinator | None = None
    segments = count = epoch = 0
    torn = ""
    for segment in _segments(directory):
        own = Coordinator(PeerName(""))
        restore(own, segment.snapshot)
        if through is None:
            through = Coordinator(PeerName(""))
            restore(through, segment.snapshot)
        elif snapshot(through) != segment.snapshot:
            raise Diverged(f"{segment.path}: the snapshot is another state than the segment before leads to")
        for at, entry in entries(segment):
            where = f"{segment.path}, offset {at}: entry {entry.number} ({entry.kind} {entry.peer})"
            for core in (own, through):
                if digest(apply(core, entry)) != entry.effects:
                    raise Diverged(f"{where} has other effects than were recorded")
            if entry.number % COMPARED == 0 and snapshot(own) != snapshot(through):
                raise Diverged(f"{where} leads to two states, or one of the {COMPARED} entries before it does")
            count += 1
        if snapshot(own) != snapshot(through):
            raise Diverged(f"{segment.path} leads to two states")
        segments, epoch, torn = segments + 1, max(through.epoch, segment.epoch), segment.torn
    return Checked(segments, count, epoch, torn)


def show(directory: Path, run: str = "") -> Iterator[str]:
    """One line for each input that did something: where it stands, when, what, and what it caused. `run`: only of this run."""
    core = Coordinator(PeerName(""))
    for segment in _segments(directory):
        restore(core, segment.snapshot)
        yield f"{segment.number:08d}  epoch {segment.epoch}, {len(core.runs)} runs, {len(segment.records)} entries"
        for _, entry in entries(segment):
            line = _line(segment, entry, apply(core, entry), run)
            if line:
                yield line
        if segment.torn:
            yield segment.torn


def _segments(directory: Path) -> Iterator[Segment]:
    for segment in read_journal(directory):
        if segment.rules != RULES:
            raise JournalError(
                f"{segment.path} was written under rules {segment.rules}, this version has rules {RULES}: "
                "look at it with the version that wrote it"
            )
        yield segment


def _line(segment: Segment, entry: Entry, sends: Sends, run: str) -> str:
    message = _message(entry)
    if not sends and (entry.kind == "tick" or isinstance(message, Heartbeat)):
        return ""
    if run and not any(_mentions(each, run) for each in (message, *(each for _, each in sends))):
        return ""
    what = brief(message) if message is not None else entry.note or (str(entry.epoch) if entry.epoch else "")
    caused = "".join(f"\n      {name} <- {brief(each)}" for name, each in sends)
    return (
        f"{segment.number:08d}:{entry.number:<6} {entry.now:12.3f}  {entry.kind} {entry.peer} {what}".rstrip() + caused
    )


def _message(entry: Entry) -> object:
    if entry.kind == "step":
        return decode(entry.message, ToCoordinator)
    return decode(entry.message, Hello) if entry.kind == "join" else None


def _mentions(value: object, run: str) -> bool:
    """Whether a field, at any depth, is this run's id."""
    if isinstance(value, str):
        return value == run
    if isinstance(value, tuple):
        return any(_mentions(each, run) for each in value)
    return is_dataclass(value) and any(_mentions(getattr(value, each.name), run) for each in fields(value))


def brief(value: object) -> str:
    """A message in a few words: no arrays, nothing empty, long texts cut."""
    if isinstance(value, bytes):
        return f"<{value[:4].hex()}>"
    if isinstance(value, tuple):
        shown = [brief(each) for each in value[:4]] + (["..."] if len(value) > 4 else [])
        return f"[{', '.join(shown)}]"
    if is_dataclass(value):
        if type(value).__str__ is not object.__str__:
            return str(value)
        parts = [f"{each.name}={brief(getattr(value, each.name))}" for each in fields(value) if _said(value, each.name)]
        return f"{type(value).__name__}({', '.join(parts)})"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _said(value: object, name: str) -> bool:
    return getattr(value, name) not in ("", b"", (), None, 0, 0.0)
