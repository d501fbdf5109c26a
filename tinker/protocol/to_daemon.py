"""What a coordinator's daemon is asked beside its core, and what it answers: its state is looked at, or it is told to stop.

Who asks need be no member, and nothing of it is written into the journal.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker.protocol.to_any import Draining, Refused


@dataclass(frozen=True, slots=True)
class Watch:
    """What do you do? Answered by `Status`."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop, as at the first SIGTERM. Answered by `Draining`."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state as JSON (the coordinator's `Snapshot`), of a bounded size: of lists that are too long it has the beginning, and says so."""

    snapshot: bytes


ToDaemon = Watch | Drain
ToWatcher = Status | Draining | Refused
