"""What the coordinator's state looks like from outside at one moment: who is a member, what runs, who is waited for, and why.

`snapshot` only reads: the status page, the metrics and `opentinker status` are made from what it returns. Ages and waits are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.core.coordinator import REJOIN, Coordinator
from coordinator.core.roster import Peer
from coordinator.core.rounds import EPISODES
from coordinator.core.run import NOBODY, Run
from coordinator.core.tables import Table
from coordinator.core.updates import unfinished
from tinker.protocol.to_coordinator import Hello
from tinker.protocol.values import AgentName, Edge, Phase, PolicyVersion


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """`in_flight`: requests it was sent and has not answered."""

    name: str
    kind: str
    engine: str
    capacity: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A member. `lease_age`: since it was last heard; at two leases it is given up. `unreachable`: for how long (None: it is not)."""

    name: str
    role: str
    machine: str
    pid: int
    lease_age: float
    model: str
    workers: tuple[WorkerStatus, ...]
    unreachable: float | None = None


@dataclass(frozen=True, slots=True)
class ArrivedStatus:
    """Who is at the barrier, and for how long."""

    member: str
    waited: float


@dataclass(frozen=True, slots=True)
class MissingStatus:
    """Who is waited for, since when, and what is known about the reason."""

    member: str
    waited: float
    why: str


@dataclass(frozen=True, slots=True)
class HostStatus:
    """A host of a run. `episodes`: what it was dealt and is not accounted for, `delivered` of them are played; at most about `capacity`
    are dealt to it at once. `state`: learner, playing, retired (it is dealt nothing more) or away (the coordinator waits for it)."""

    name: str
    state: str
    capacity: int
    episodes: int
    delivered: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at its present barrier. `versions`: of each policy the newest; `requests_waiting`: for a worker that serves their version.
    `lags`: by how many versions what is played of each policy is older than the newest; `updating`: agents whose weights may move, with
    the round (only where updates overlap rollouts). `groups_waiting`: of episodes, for a host with room."""

    run: str
    scenario: str
    host: str
    state: str
    round: int
    rounds: int
    phase: str
    edge: str
    arrived: tuple[ArrivedStatus, ...]
    missing: tuple[MissingStatus, ...]
    versions: dict[str, int]
    episodes_open: int
    turns_open: int
    requests_waiting: int
    lags: dict[str, int]
    updating: dict[str, int]
    hosts: tuple[HostStatus, ...]
    groups_waiting: int


@dataclass(frozen=True, slots=True)
class QueuedStatus:
    run: str
    scenario: str
    host: str
    place: int


@dataclass(frozen=True, slots=True)
class StoppedStatus:
    """One of the last runs that their learner host did not end itself, and why."""

    run: str
    scenario: str
    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`draining`: why nothing new begins ("": it does). `counts`: the coordinator's totals, by name. `left_out`: entries of lists that are
    missing here, because there were too many (`coordinator.app.bounded`)."""

    coordinator: str
    epoch: int
    uptime: float
    lease: float
    draining: str
    peers: tuple[PeerStatus, ...]
    queue: tuple[QueuedStatus, ...]
    runs: tuple[RunStatus, ...]
    counts: dict[str, int]
    stopped: tuple[StoppedStatus, ...]
    left_out: int = 0


def snapshot(core: Coordinator, now: float, began: float = 0.0) -> Snapshot:
    """The state at `now`; `began`: when the daemon did."""
    queued = enumerate(core.queue.values(), start=1)
    return Snapshot(
        core.name,
        core.epoch,
        now - began,
        core.lease,
        core.draining,
        _peers(core, now),
        tuple(QueuedStatus(spec.run, spec.scenario, host, place) for place, (spec, host) in queued),
        tuple(_run(core, run, now) for run in core.runs.values()),
        dict(sorted(core.counts.items())),
        tuple(StoppedStatus(each.run, each.scenario, each.host, each.reason) for each in core.stopped),
    )


def _peers(core: Coordinator, now: float) -> tuple[PeerStatus, ...]:
    here = [
        _peer(core, peer.hello, now - peer.heard, _unreachable(peer, core.lease, now))
        for peer in core.roster.peers.values()
    ]
    since = [(each.hello, now - (each.until - REJOIN)) for each in core.roster.away.values()]
    return tuple(here + [_peer(core, hello, age, age) for hello, age in since])


def _unreachable(peer: Peer, lease: float, now: float) -> float | None:
    """For how long: since its connection was closed, or since it had to be heard."""
    if peer.closed is not None:
        return now - peer.closed
    late = now - peer.heard - lease
    return late if late > 0 else None


def _peer(core: Coordinator, hello: Hello, age: float, unreachable: float | None) -> PeerStatus:
    in_flight = core.turns.in_flight
    return PeerStatus(
        hello.name,
        str(hello.role),
        hello.machine,
        hello.pid,
        age,
        hello.model.name if hello.model is not None else "",
        tuple(
            WorkerStatus(each.name, str(each.kind), each.engine, each.capacity, in_flight.get(each.name, 0))
            for each in hello.workers
        ),
        unreachable,
    )


def _run(core: Coordinator, run: Run, now: float) -> RunStatus:
    rounds = run.rounds
    tables = [table for (owner, _), table in core.turns.tables.items() if owner == run.spec.run]
    requests = [each for table in tables if table.turn for each in table.turn.waiting]
    return RunStatus(
        run.spec.run,
        run.spec.scenario,
        run.host,
        "finished" if rounds.finished else str(rounds.phase),
        rounds.round,
        run.spec.rounds,
        str(rounds.phase),
        str(rounds.edge),
        tuple(ArrivedStatus(member, now - at) for member, at in rounds.barrier.arrived),
        () if rounds.finished else tuple(_missing(core, run, tables, now)),
        dict(sorted(run.versions.current.items())),
        len(rounds.unaccounted),
        sum(table.turn is not None for table in tables),
        sum(each.worker is None for each in requests),
        _lags(run),
        {agent: gate.round for gate in run.updates.gates for agent in sorted(gate.updating)},
        tuple(_hosts(core, run)),
        len(run.dealing.waiting),
    )


def _lags(run: Run) -> dict[str, int]:
    """Policies of the episodes that are played; 0 where nothing is."""
    versions, playing = run.rounds.versions, bool(run.rounds.unaccounted)
    return {
        agent.policy: run.versions.current[agent.policy] - versions.get(agent.name, 0) if playing else 0
        for agent in run.spec.agents
        if agent.policy in run.versions.current
    }


def _hosts(core: Coordinator, run: Run) -> Iterable[HostStatus]:
    """The learner host first, then the others in order of joining."""
    for name, hand in run.dealing.hosts.items():
        groups = [group for group in run.dealing.groups.values() if group.host == name]
        state = "learner" if name == run.host else "retired" if hand.retired else "playing"
        yield HostStatus(
            name,
            "away" if hand.cut else state,
            hand.capacity,
            sum(len(group.episodes) for group in groups),
            sum(len(group.delivered) for group in groups),
        )


def _missing(core: Coordinator, run: Run, tables: list[Table], now: float) -> Iterable[MissingStatus]:
    """Everybody the present barrier waits for. It has waited for all of them since it began to gather."""
    waited = now - run.since
    if run.rounds.barrier.members == (EPISODES,):
        if run.rounds.unaccounted:
            yield MissingStatus(
                f"{len(run.rounds.unaccounted)} episodes", waited, _why_episodes(core, run, tables, now)
            )
        return
    for member in run.rounds.barrier.missing:
        yield MissingStatus(member, waited, _why_agent(core, run, AgentName(member), now))


def _why_agent(core: Coordinator, run: Run, agent: AgentName, now: float) -> str:
    held = run.rounds.held.get(agent)
    if held is not None:
        policy = next(each.policy for each in run.spec.agents if each.name == agent)
        version = PolicyVersion(policy, held.version)
        if version not in run.versions.adapters:
            return f"{version} is not published yet"
        return f"{version} is loading at {_names(run.versions.not_serving(version))}"
    late = unfinished(run.updates, agent)
    if late and agent not in run.updates.updating:
        return f"its update of round {late} has not begun"
    busy = [(asked.operation, worker) for asked, worker in run.pending.values() if asked.agent == agent]
    if busy:
        operation, worker = busy[0]
        of = f" for its update of round {late}" if late else ""
        if worker == NOBODY:
            return f"{type(operation).__name__}{of} waits for an update worker: {run.why}"
        return f"{type(operation).__name__} is running at {worker}{of}"
    if late:
        return f"its update of round {late} has not ended; {_host(core, run, now)}"
    order = run.rounds.order
    if (run.rounds.phase, run.rounds.edge) == (Phase.UPDATE, Edge.END):
        if agent in order.due and agent not in order.admitted:
            before = sorted(set(order.admitted) - order.done)
            return f"its turn to update comes after {_names(before)}"
        if agent in order.due:
            return f"it may update; {_host(core, run, now)} has asked for nothing yet"
    return f"it has not arrived; {_host(core, run, now)}"


def _why_episodes(core: Coordinator, run: Run, tables: list[Table], now: float) -> str:
    requests = [each for table in tables if table.turn for each in table.turn.waiting]
    holders = sorted({each.worker for each in requests if each.worker is not None})
    nowhere = sum(each.worker is None for each in requests)
    told = []
    if holders:
        told.append(f"{len(requests) - nowhere} requests are at {_names(holders)}")
    if nowhere:
        told.append(f"{nowhere} requests wait for a worker that serves their version")
    return "; ".join(told) or f"no turn is open: {_host(core, run, now)}"


def _host(core: Coordinator, run: Run, now: float) -> str:
    peer = core.roster.peers.get(run.host)
    heard = f"heard {now - peer.heard:.0f} s ago" if peer is not None else "gone"
    if peer is not None and (cut := _unreachable(peer, core.lease, now)) is not None:
        heard = f"unreachable for {cut:.0f} s"
    return f"its host {run.host} ({heard})"


def _names(names: Iterable[str]) -> str:
    """Some names; never a long list."""
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
