"""A snapshot as one message of a bounded size, however many members, runs and agents there are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from coordinator.app.snapshot import Snapshot
from tinker.protocol.to_any import Refused
from tinker.protocol.to_daemon import Status

SNAPSHOT = TypeAdapter(Snapshot)
LIMIT = 1024 * 1024  # bytes of a status
LENGTHS = (1000, 100, 10)  # of its lists, if it would be larger


def status_of(taken: Snapshot, limit: int = LIMIT) -> Status | Refused:
    """What there is, or the beginning of each of its lists; `left_out` says how many entries are missing."""
    whole = SNAPSHOT.dump_json(taken)
    for length in LENGTHS:
        if len(whole) <= limit:
            return Status(whole)
        cut, left_out = _cut(taken, length)
        whole = SNAPSHOT.dump_json(replace(cut, left_out=left_out))
    return Status(whole) if len(whole) <= limit else Refused("Watch", f"the status has more than {limit} bytes")


def _cut(value: Any, length: int) -> tuple[Any, int]:
    """The same with at most `length` items in each list and dict, and how many items are missing."""
    if isinstance(value, dict):
        return dict(list(value.items())[:length]), max(0, len(value) - length)
    if isinstance(value, tuple):
        parts = [_cut(each, length) for each in value[:length]]
        return tuple(part for part, _ in parts), max(0, len(value) - length) + sum(number for _, number in parts)
    if is_dataclass(value):
        cuts = {each.name: _cut(getattr(value, each.name), length) for each in fields(value)}
        kind: Any = type(value)
        made = kind(**{name: part for name, (part, _) in cuts.items()})
        return made, sum(number for _, number in cuts.values())
    return value, 0
