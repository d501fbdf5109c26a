"""Which host of a run plays which group of episodes.

A run has its learner host and any number of further ones. A group goes to one host as a whole: to the one whose load, as a share of its
capacity, is least (of equals: who came first), and only while that is below its capacity; other groups wait. So a host that joins in the
middle of a phase is dealt what waits at once, and everything else from the next phase on. A group whose host is lost is dealt anew, under
the next attempt, and only what is not accounted for is played again. Who retires is dealt nothing more and keeps what it has.

An episode is off its host's load once it is delivered (or accounted for), and off the group once it is accounted for; that is the learner
host's word alone. Whoever had a group is told when it is settled.

Invariants (checked by `violations`):
- D1 an episode is in one group, and a group waits or is at one host of the run, whose attempt is the only one that counts;
- D2 the load of a host counts exactly what it was dealt and has not delivered;
- D3 no group waits while a host has room (no lost wake-up).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tinker.protocol.making import changed
from tinker.protocol.to_host import Delivered, Play, Settled
from tinker.protocol.values import BlobRef, Dealt, EpisodeId, PeerName, Phase, PolicyVersion, RunId, Term

NOBODY = PeerName("")

Sends = list[tuple[PeerName, object]]


@dataclass(frozen=True, slots=True)
class Hand:
    """A host of the run. `load`: episodes it was dealt and has not delivered. `retired`: it is dealt nothing more; `cut`: nor while it
    cannot be reached."""

    capacity: int
    load: int = 0
    retired: bool = False
    cut: bool = False

    @property
    def has_room(self) -> bool:
        return not self.retired and not self.cut and self.load < self.capacity


@dataclass(frozen=True, slots=True)
class Group:
    """`episodes`: those not accounted for, in order. `delivered`: those of them that its host has played. `host` NOBODY: it waits."""

    episodes: tuple[EpisodeId, ...]
    host: PeerName = NOBODY
    attempt: int = 0
    delivered: frozenset[EpisodeId] = frozenset()


@dataclass(slots=True)
class Dealing:
    """The hosts of one run, and the groups of its present phase. Mutates itself but is otherwise pure. `where`: the group of each episode
    that is not accounted for. `waiting`: groups that nobody has, in order. `bundles`: whether further hosts have left any."""

    run: RunId
    learner: PeerName
    hosts: dict[PeerName, Hand]
    round: int = 0
    phase: Phase = Phase.ROLLOUT
    versions: tuple[PolicyVersion, ...] = ()
    groups: dict[int, Group] = field(default_factory=dict)
    where: dict[EpisodeId, int] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()
    bundles: bool = False

    # --- the phase ---

    def begin(self, groups: Sequence[tuple[EpisodeId, ...]], versions: tuple[PolicyVersion, ...]) -> Sends:
        """A phase has begun; begun again, the learner host is told again what it has."""
        first = groups[0][0]
        if (first.round, first.phase) == (self.round, self.phase):
            return [(self.learner, self._play(n)) for n, group in self.groups.items() if group.host == self.learner]
        self.round, self.phase, self.versions, self.bundles = first.round, first.phase, versions, False
        self.groups = {number: Group(tuple(group)) for number, group in enumerate(groups)}
        self.where = {episode: number for number, group in enumerate(groups) for episode in group}
        self.waiting = tuple(self.groups)
        self.hosts = {name: changed(hand, load=0) for name, hand in self.hosts.items()}
        return self._deal()

    def account(self, episode: EpisodeId) -> Sends:
        """It is accounted for; one that was before changes nothing."""
        number = self.where.pop(episode, None)
        if number is None:
            return []
        group = self.groups[number]
        if group.host and episode not in group.delivered:
            self._unload(group.host, 1)
        left = tuple(each for each in group.episodes if each != episode)
        self.groups[number] = changed(group, episodes=left, delivered=group.delivered - {episode})
        return (self._settle((number,)) if not left else []) + self._deal()

    def drop(self) -> Sends:
        """Nothing of this phase is played any more."""
        sends = self._settle(tuple(self.groups))
        self.where, self.waiting = {}, ()
        self.hosts = {name: changed(hand, load=0) for name, hand in self.hosts.items()}
        return sends

    # --- hosts ---

    def join(self, host: PeerName, capacity: int) -> Sends:
        """A further host is there; one that is there already may have another capacity, and is retired no longer."""
        known = self.hosts.get(host, Hand(capacity))
        self.hosts[host] = changed(known, capacity=capacity, retired=False, cut=False)
        return self._deal()

    def retire(self, host: PeerName) -> Sends:
        """A further host is dealt nothing more. What it was dealt it has heard before it hears this answer, which settles nothing."""
        if host == self.learner:
            return []
        self.hosts[host] = changed(self.hosts[host], retired=True)
        return [(host, Settled(self.run, ()))]

    def reach(self, host: PeerName, reached: bool) -> Sends:
        """The host can be reached again, or cannot be: it keeps what it has, and is dealt nothing meanwhile."""
        if host not in self.hosts or self.hosts[host].cut is not reached:
            return []
        self.hosts[host] = changed(self.hosts[host], cut=not reached)
        return self._deal()

    def lose(self, host: PeerName) -> tuple[tuple[EpisodeId, ...], Sends]:
        """A further host is gone. Returns what it had in hand, which others play again, and what is to be said once its tables are gone."""
        if host not in self.hosts or host == self.learner:
            return (), []
        del self.hosts[host]
        lost = [number for number, group in self.groups.items() if group.host == host]
        for number in lost:
            group = self.groups[number]
            self.groups[number] = Group(group.episodes, attempt=group.attempt + 1)
        self.waiting = tuple(sorted({*self.waiting, *lost}))
        again = tuple(episode for number in lost for episode in self.groups[number].episodes)
        return again, self._deal()

    def in_hand(self, host: PeerName, deals: Iterable[Dealt]) -> Sends:
        """What this host has and does not list, and what it lists and does not have (any more)."""
        listed = set(deals)
        mine = {self._deal_of(number): number for number, group in self.groups.items() if group.host == host}
        sends: Sends = [(host, self._play(number)) for deal, number in mine.items() if deal not in listed]
        strange = tuple(sorted(listed - mine.keys()))
        return sends + ([(host, Settled(self.run, strange))] if strange and host != self.learner else [])

    def played(self, host: PeerName, deal: Dealt, episodes: Iterable[EpisodeId], bundle: BlobRef) -> Sends | None:
        """These wait for the learner host to account for them. None: the deal is not this host's (any more)."""
        group = self.groups.get(deal.group)
        if group is None or group.host != host or self._deal_of(deal.group) != deal:
            return None
        self.bundles = True
        left = tuple(each for each in episodes if each in group.episodes)
        if not left:
            return []
        self._unload(host, len(set(left) - group.delivered))
        self.groups[deal.group] = changed(group, delivered=group.delivered | set(left))
        return [(self.learner, Delivered(self.run, host, deal, left, bundle)), *self._deal()]

    def holder(self, episode: EpisodeId) -> tuple[PeerName, int]:
        """Who plays it, and which attempt that is; NOBODY: nobody does."""
        number = self.where.get(episode)
        if number is None:
            return NOBODY, 0
        return self.groups[number].host, self.groups[number].attempt

    def further(self) -> tuple[PeerName, ...]:
        """The hosts but the learner host, in order of joining."""
        return tuple(name for name in self.hosts if name != self.learner)

    # --- inside ---

    def _deal(self) -> Sends:
        """Deal what waits, as long as anybody has room."""
        sends: Sends = []
        while self.waiting:
            open_ = [(hand.load / hand.capacity, name) for name, hand in self.hosts.items() if hand.has_room]
            if not open_:
                break
            host = min(open_, key=lambda each: each[0])[1]
            number, self.waiting = self.waiting[0], self.waiting[1:]
            group = self.groups[number]
            self.groups[number] = changed(group, host=host)
            self._unload(host, -len(group.episodes))
            sends.append((host, self._play(number)))
        return sends

    def _unload(self, host: PeerName, episodes: int) -> None:
        hand = self.hosts[host]
        self.hosts[host] = changed(hand, load=hand.load - episodes)

    def _settle(self, numbers: tuple[int, ...]) -> Sends:
        """These groups are over; whoever had them is told (the learner host knows)."""
        sends: Sends = []
        for number in numbers:
            host = self.groups[number].host
            if host not in (NOBODY, self.learner):
                sends.append((host, Settled(self.run, (self._deal_of(number),))))
        self.waiting = tuple(number for number in self.waiting if number not in numbers)
        for number in numbers:
            del self.groups[number]
        return sends

    def _deal_of(self, number: int) -> Dealt:
        return Dealt(self.round, self.phase, number, self.groups[number].attempt)

    def _play(self, number: int) -> Play:
        group = self.groups[number]
        versions = () if group.host == self.learner else self.versions
        return Play(self.run, self.round, self.phase, number, group.episodes, group.attempt, versions)

    def violations(self) -> list[str]:
        found = []
        inside = {episode: number for number, group in self.groups.items() for episode in group.episodes}
        homeless = tuple(number for number, group in self.groups.items() if not group.host)
        strangers = {group.host for group in self.groups.values()} - self.hosts.keys() - {NOBODY}
        if inside != self.where or sorted(homeless) != list(self.waiting) or strangers:
            found.append("D1")
        load: Counter[PeerName] = Counter()
        for group in self.groups.values():
            load[group.host] += len(group.episodes) - len(group.delivered)
        if any(hand.load != load[name] for name, hand in self.hosts.items()):
            found.append("D2")
        if self.waiting and any(hand.has_room for hand in self.hosts.values()):
            found.append("D3")
        return found


def disagreement(ours: tuple[Term, ...], theirs: tuple[Term, ...]) -> str:
    """The first thing in which a further host's scenario is not the run's ("": they agree)."""
    named = {term.name: term.value for term in theirs}
    for term in ours:
        found = named.get(term.name, "missing")
        if found != term.value:
            return f"{term.name} is {found}, the run's is {term.value}"
    return ""
