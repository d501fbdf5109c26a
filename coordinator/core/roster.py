"""Who is a member: peers by name, what they offer, when they were last heard, and what each role may say.

Invariants (checked by `violations`):
- M1 a name belongs to one living peer;
- M2 a worker name belongs to one living peer, and `owners` says to whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from tinker.protocol import to_coordinator as said
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
OfHost = said.Submit | said.Arrive | said.OpenTurn | said.EpisodeEnded | said.Operate | said.EndRun
OfAnybody = said.Hello | said.Heartbeat | said.Bye
OF_WORKER = frozenset(get_args(OfWorker))
CALLS = {
    Role.HOST: frozenset(get_args(OfHost | OfAnybody)),
    Role.TASKSERVER: frozenset(get_args(OfWorker | OfAnybody)),
    Role.OPERATOR: frozenset(get_args(OfAnybody)),
}


class MemberRefused(Exception):
    """Who is refused, and what they should do. The roster has not changed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member; `heard`: when its last message came."""

    hello: Hello
    heard: float


@dataclass(frozen=True, slots=True)
class Roster:
    """`owners`: whose each worker is."""

    peers: Mapping[PeerName, Peer] = field(default_factory=dict)
    owners: Mapping[WorkerName, PeerName] = field(default_factory=dict)

    def owner(self, worker: WorkerName) -> PeerName | None:
        return self.owners.get(worker)

    def workers(self, peers: tuple[PeerName, ...], kind: PoolKind) -> tuple[WorkerOffer, ...]:
        """The workers of this kind at these peers, by name."""
        found = [w for n in peers if n in self.peers for w in self.peers[n].hello.workers if w.kind == kind]
        return tuple(sorted(found, key=lambda worker: worker.name))


def join(roster: Roster, hello: Hello, now: float) -> Roster:
    """A peer becomes a member. MemberRefused if its name or one of its workers' names is taken by a living one."""
    taken = roster.peers.get(hello.name)
    if taken is not None:
        raise MemberRefused(
            f"the name {hello.name!r} is already in use by process {taken.hello.pid} on {taken.hello.machine}; "
            f"start this peer under another name, or stop that one first"
        )
    if hello.role == Role.TASKSERVER and (hello.model is None or not hello.workers):
        raise MemberRefused(f"task server {hello.name!r} offers no model or no workers; give it at least one pool")
    if hello.role != Role.TASKSERVER and (hello.model is not None or hello.workers):
        raise MemberRefused(f"{hello.role} {hello.name!r} offers a model or workers; only a task server may")
    names = [worker.name for worker in hello.workers]
    clash = [name for name in names if roster.owner(name) is not None or names.count(name) > 1]
    if clash:
        raise MemberRefused(f"worker name {clash[0]!r} is already in use; worker names must be unique")
    owners = {**roster.owners, **dict.fromkeys(names, hello.name)} if names else roster.owners
    return Roster({**roster.peers, hello.name: Peer(hello, now)}, owners)


def hear(roster: Roster, name: PeerName, now: float) -> Roster:
    """Any message renews the lease."""
    return replace(roster, peers={**roster.peers, name: replace(roster.peers[name], heard=now)})


def leave(roster: Roster, name: PeerName) -> Roster:
    return Roster(
        {other: peer for other, peer in roster.peers.items() if other != name},
        {worker: owner for worker, owner in roster.owners.items() if owner != name},
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
    )


def silent(roster: Roster, since: float) -> tuple[PeerName, ...]:
    """Members not heard since then."""
    return tuple(name for name, peer in roster.peers.items() if peer.heard < since)


def models(roster: Roster) -> tuple[str, ...]:
    """Digests of the models that task servers hold, in order of joining."""
    return tuple(dict.fromkeys(p.hello.model.digest for p in roster.peers.values() if p.hello.model is not None))


def task_servers(roster: Roster, model: str) -> tuple[PeerName, ...]:
    """Task servers that hold the model with this digest, in order of joining."""
    return tuple(n for n, p in roster.peers.items() if p.hello.model is not None and p.hello.model.digest == model)


def violations(roster: Roster) -> list[str]:
    workers = [(worker.name, name) for name, peer in roster.peers.items() for worker in peer.hello.workers]
    found = ["M2"] if sorted(workers) != sorted(roster.owners.items()) else []
    return found + ["M1" for name, peer in roster.peers.items() if peer.hello.name != name]
