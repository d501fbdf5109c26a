"""A barrier: a fixed set of members, who has arrived and when, and whether it has opened.

Invariants (checked by `violations`):
- B1 only members arrive, each at most once;
- B2 it opens exactly when the last member has arrived, and never shuts again;
- B3 it never stays shut while nobody is missing (a barrier without members is open at birth).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinker.protocol.to_host import Wait


@dataclass(frozen=True, slots=True)
class Barrier:
    """`arrived` is in order of arrival, with the time of each."""

    members: tuple[str, ...]
    arrived: tuple[tuple[str, float], ...] = ()
    opened: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        here = {member for member, _ in self.arrived}
        return tuple(member for member in self.members if member not in here)

    def has(self, member: str) -> bool:
        return any(name == member for name, _ in self.arrived)

    def waits(self, now: float) -> tuple[Wait, ...]:
        """How long each member has waited so far, and for whom (the last to arrive)."""
        last = self.arrived[-1][0] if self.arrived else ""
        return tuple(Wait(name, now - at, "" if name == last else last) for name, at in self.arrived)


def gather(members: tuple[str, ...]) -> Barrier:
    """A new barrier for these members."""
    return Barrier(members, opened=not members)


def arrive(barrier: Barrier, member: str, now: float) -> Barrier:
    """The barrier after this arrival; a second arrival of the same member changes nothing. KeyError if it is not a member."""
    if member not in barrier.members:
        raise KeyError(member)
    if barrier.opened or barrier.has(member):
        return barrier
    after = replace(barrier, arrived=(*barrier.arrived, (member, now)))
    return replace(after, opened=not after.missing)


def violations(barrier: Barrier) -> list[str]:
    """Which invariants this state breaks (none, if the machine is right)."""
    found = []
    names = [name for name, _ in barrier.arrived]
    if len(set(names)) != len(names) or not set(names) <= set(barrier.members):
        found.append("B1")
    if barrier.opened and barrier.missing:
        found.append("B2")
    if not barrier.opened and not barrier.missing:
        found.append("B3")
    return found
