"""A barrier: a fixed set of members, who has arrived and when, and whether it has opened.

Invariants (checked by `violations`):
- B1 only members arrive, each at most once;
- B2 it opens exactly when the last member has arrived (or whoever has not is no member any more), and never shuts again;
- B3 it never stays shut while nobody is missing (a barrier without members is open at birth);
- B4 `awaited` are the members that have not arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat


@dataclass(frozen=True, slots=True)
class Barrier:
    """`arrived` is in order of arrival, with the time of each. `awaited`: who has not arrived."""

    members: tuple[str, ...]
    arrived: tuple[tuple[str, float], ...] = ()
    opened: bool = False
    awaited: frozenset[str] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """Who has not arrived, in the order of the members."""
        return tuple(member for member in self.members if member in self.awaited)

    def has(self, member: str) -> bool:
        """Whether this member has arrived."""
        return member not in self.awaited and member in self.members


def gather(members: tuple[str, ...]) -> Barrier:
    """A new barrier for these members."""
    return Barrier(members, opened=not members, awaited=frozenset(members))


def arrive(barrier: Barrier, members: Sequence[str], now: float) -> Barrier:
    """The barrier after these have arrived; one that has arrived before changes nothing. KeyError names one that is not a member."""
    come = dict.fromkeys(members)
    everybody = come.keys() == barrier.awaited
    fresh = tuple(come if everybody else [member for member in come if member in barrier.awaited])
    if len(fresh) < len(members):
        for stranger in set(members) - set(barrier.members):
            raise KeyError(stranger)
    if not fresh:
        return barrier
    awaited = frozenset[str]() if everybody else barrier.awaited - set(fresh)
    arrived = (*barrier.arrived, *zip(fresh, repeat(now)))
    return Barrier(barrier.members, arrived, not awaited, awaited)


def leave_out(barrier: Barrier) -> Barrier:
    """The barrier without the members that have not arrived: it opens."""
    here = tuple(member for member in barrier.members if member not in barrier.awaited)
    return Barrier(here, barrier.arrived, True)


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
    if barrier.awaited != set(barrier.members) - set(names):
        found.append("B4")
    return found
