"""Who is a member: peers by name, what they offer, when they were last heard, and what each role may say.

A member whose connection was closed is unreachable, not gone: it keeps what it had until its lease ends, and is itself again when it says
Hello. Only another process may take its name meanwhile, which says that the first one is gone.

Invariants (checked by `violations`):
- M1 a name belongs to one peer, which is a member or away;
- M2 a worker name belongs to one living peer, and `owners` says to whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from tinker.protocol import to_coordinator as said
from tinker.protocol.making import changed
from tinker.protocol.to_coordinator import Hello, WorkerOffer
from tinker.protocol.values import PeerName, PoolKind, Role, WorkerName

OfWorker = (
    said.Generated
    | said.GenerateFailed
    | said.Loaded
    | said.LoadFailed
    | said.WorkerDone
    | said.WorkerFailed
    | said.WorkerLost
)
OfLearnerHost = said.Submit | said.Arrive | said.Arrivals | said.EpisodeEnded | said.Operate | said.EndRun
OfFurtherHost = said.Enlist | said.Retire | said.Played
OfHost = OfLearnerHost | OfFurtherHost | said.OpenTurn | said.InHand
OfAnybody = said.Hello | said.Heartbeat | said.Bye
OF_WORKER = frozenset(get_args(OfWorker))
CALLS = {
    Role.HOST: frozenset(get_args(OfHost | OfAnybody)),
    Role.TASKSERVER: frozenset(get_args(OfWorker | OfAnybody)),
    Role.PLAYER: frozenset(get_args(OfAnybody)),
    Role.OPERATOR: frozenset(),
    Role.VIEWER: frozenset(),
}


class MemberRefused(Exception):
    """Who is refused, and what they should do. The roster has not changed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member; `heard`: when its last message came. `closed`: when its connection was (None: it is open)."""

    hello: Hello
    heard: float
    closed: float | None = None


@dataclass(frozen=True, slots=True)
class Away:
    """Who was a member when the coordinator restarted, and until when it may come back."""

    hello: Hello
    until: float


@dataclass(frozen=True, slots=True)
class Roster:
    """`owners`: whose each worker is. `away`: who has not been heard since the coordinator restarted."""

    peers: Mapping[PeerName, Peer] = field(default_factory=dict)
    owners: Mapping[WorkerName, PeerName] = field(default_factory=dict)
    away: Mapping[PeerName, Away] = field(default_factory=dict)

    def owner(self, worker: WorkerName) -> PeerName | None:
        return self.owners.get(worker)

    def workers(self, peers: tuple[PeerName, ...], kind: PoolKind) -> tuple[WorkerOffer, ...]:
        """The workers of this kind at these peers, by name."""
        found = [w for n in peers if n in self.peers for w in self.peers[n].hello.workers if w.kind == kind]
        return tuple(sorted(found, key=lambda worker: worker.name))


def same_process(one: Hello, other: Hello) -> bool:
    """Whether both are of one process, which joins anew; else another process has taken the name."""
    return (one.role, one.machine, one.pid) == (other.role, other.machine, other.pid)


def takes_over(roster: Roster, hello: Hello) -> bool:
    """Whether a member says Hello again, under a later incarnation or on a new connection: it is still itself and has lost contact."""
    known = roster.peers.get(hello.name)
    if known is None or not same_process(known.hello, hello):
        return False
    return hello.incarnation > known.hello.incarnation - (known.closed is not None)


def replaced(roster: Roster, hello: Hello) -> Hello | None:
    """Who had this name until its connection was closed, or the coordinator restarted, if that was another process: it is gone."""
    peer, away = roster.peers.get(hello.name), roster.away.get(hello.name)
    before = away.hello if away is not None else peer.hello if peer is not None and peer.closed is not None else None
    return None if before is None or same_process(before, hello) else before


def check(roster: Roster, hello: Hello) -> None:
    """MemberRefused if this peer may not become a member: its role is none of members, its name or one of its workers' names is taken by a
    living one."""
    taken = roster.peers.get(hello.name)
    if taken is not None and not takes_over(roster, hello) and replaced(roster, hello) is None:
        raise MemberRefused(
            f"the name {hello.name!r} is already in use by process {taken.hello.pid} on {taken.hello.machine}; "
            f"start this peer under another name, or stop that one first"
        )
    if hello.role == Role.TASKSERVER and (hello.model is None or not hello.workers):
        raise MemberRefused(f"task server {hello.name!r} offers no model or no workers; give it at least one pool")
    if hello.role != Role.TASKSERVER and (hello.model is not None or hello.workers):
        raise MemberRefused(f"{hello.role} {hello.name!r} offers a model or workers; only a task server may")
    if not CALLS[hello.role]:
        raise MemberRefused(
            f"{hello.role} {hello.name!r} is no member: it says no Hello, it only asks what the daemon answers itself"
        )
    names = [worker.name for worker in hello.workers]
    clash = [name for name in names if roster.owner(name) not in (None, hello.name) or names.count(name) > 1]
    if clash:
        raise MemberRefused(f"worker name {clash[0]!r} is already in use; worker names must be unique")


def join(roster: Roster, hello: Hello, now: float) -> Roster:
    """A peer becomes a member, or is one again. MemberRefused as in `check`."""
    check(roster, hello)
    names = [worker.name for worker in hello.workers]
    owners = roster.owners
    if names or hello.name in roster.peers:
        others = {worker: owner for worker, owner in owners.items() if owner != hello.name}
        owners = {**others, **dict.fromkeys(names, hello.name)}
    away = {name: each for name, each in roster.away.items() if name != hello.name} if roster.away else roster.away
    return Roster({**roster.peers, hello.name: Peer(hello, now)}, owners, away)


def restart(roster: Roster, until: float) -> Roster:
    """Nobody is a member until it says Hello again; whoever was one may come back until then."""
    known = {name: each.hello for name, each in roster.away.items()}
    known |= {name: peer.hello for name, peer in roster.peers.items()}
    return Roster(away={name: Away(hello, until) for name, hello in known.items()})


def hear(roster: Roster, name: PeerName, now: float) -> Roster:
    """Any message renews the lease."""
    return changed(roster, peers={**roster.peers, name: changed(roster.peers[name], heard=now)})


def part(roster: Roster, name: PeerName, now: float) -> Roster:
    """Its connection was closed: it is unreachable until it says Hello again."""
    peer = roster.peers.get(name)
    if peer is None or peer.closed is not None:
        return roster
    return replace(roster, peers={**roster.peers, name: replace(peer, closed=now)})


def leave(roster: Roster, name: PeerName) -> Roster:
    return Roster(
        {other: peer for other, peer in roster.peers.items() if other != name},
        {worker: owner for worker, owner in roster.owners.items() if owner != name},
        {other: each for other, each in roster.away.items() if other != name},
    )


def drop_worker(roster: Roster, worker: WorkerName) -> Roster:
    """The worker is gone for good; its peer stays."""
    owner = roster.owner(worker)
    if owner is None:
        return roster
    peer = roster.peers[owner]
    left = tuple(each for each in peer.hello.workers if each.name != worker)
    return Roster(
        {**roster.peers, owner: replace(peer, hello=replace(peer.hello, workers=left))},
        {other: name for other, name in roster.owners.items() if other != worker},
        roster.away,
    )


def silent(roster: Roster, since: float) -> tuple[PeerName, ...]:
    """Members not heard since then."""
    return tuple(name for name, peer in roster.peers.items() if peer.heard < since)


def models(roster: Roster, wanted: str = "") -> tuple[str, ...]:
    """Digests of the models that task servers hold, in order of joining. `wanted`: only those of this digest or name."""
    held = (peer.hello.model for peer in roster.peers.values() if peer.hello.model is not None)
    return tuple(dict.fromkeys(model.digest for model in held if wanted in ("", model.digest, model.name)))


def task_servers(roster: Roster, model: str) -> tuple[PeerName, ...]:
    """Task servers that hold the model with this digest, in order of joining."""
    return tuple(n for n, p in roster.peers.items() if p.hello.model is not None and p.hello.model.digest == model)


def violations(roster: Roster) -> list[str]:
    workers = [(worker.name, name) for name, peer in roster.peers.items() for worker in peer.hello.workers]
    found = ["M2"] if sorted(workers) != sorted(roster.owners.items()) else []
    found += ["M1" for name, peer in roster.peers.items() if peer.hello.name != name or name in roster.away]
    return found
