"""The whole coordinator as one deterministic machine: messages and time in, messages to send out.

It composes the parts: roster, queue of runs, rounds, update order, versions, tables, routing. No await, no clock, no randomness: the same
sequence of `step`, `lose` and `tick` calls gives the same states and the same messages (I8).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coordinator.core import roster as members
from coordinator.core import rounds as rnd
from coordinator.core import tables as gate
from coordinator.core.roster import MemberRefused, Roster
from coordinator.core.rounds import ArrivalRefused
from coordinator.core.routing import choose
from coordinator.core.run import Run, Sends
from coordinator.core.tables import GateError, Table
from coordinator.core.versions import Versions
from tinker.protocol import to_coordinator as said
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_host import Admitted, Missing, Queued, RunStopped, TurnClosed, TurnRefused
from tinker.protocol.to_taskserver import Cancel, Forget, Generate, Release
from tinker.protocol.values import EpisodeId, PeerName, PoolKind, Role, RunId, WorkerName

CALLS: dict[Role, tuple[type, ...]] = {
    Role.HOST: (said.Submit, said.Arrive, said.OpenTurn, said.EpisodeEnded, said.Operate, said.EndRun),
    Role.TASKSERVER: (
        said.Generated,
        said.GenerateFailed,
        said.Loaded,
        said.LoadFailed,
        said.WorkerDone,
        said.WorkerFailed,
        said.WorkerLost,
    ),
    Role.OPERATOR: (),
}
CALLS = {role: (*calls, said.Hello, said.Heartbeat, said.Bye) for role, calls in CALLS.items()}
NOTICE = 10.0  # seconds between notices of who a shut barrier waits for


@dataclass(slots=True)
class Coordinator:
    """`lease`: a member silent for two leases is lost. `counts`: refusals and totals, by name."""

    name: PeerName
    epoch: int = 1
    lease: float = 15.0
    roster: Roster = field(default_factory=Roster)
    queue: dict[RunId, tuple[said.RunSpec, PeerName]] = field(default_factory=dict)
    runs: dict[RunId, Run] = field(default_factory=dict)
    tables: dict[tuple[RunId, EpisodeId], Table] = field(default_factory=dict)
    in_flight: Counter[WorkerName] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def join(self, hello: said.Hello, now: float) -> Sends:
        """A new member. MemberRefused if its name is taken."""
        self.roster = members.join(self.roster, hello, now)
        sends: Sends = [(hello.name, Welcome(self.name, self.epoch, self.lease))]
        if hello.role == Role.TASKSERVER and hello.model is not None:
            for run in self.runs.values():
                if hello.name in members.task_servers(self.roster, run.spec.model):
                    for worker in self.roster.workers((hello.name,), PoolKind.ROLLOUT):
                        sends += run.join(worker.name, hello.name)
            for waiting in tuple(self.queue):
                sends += self._admit(waiting, now)
        return sends

    def step(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        """One message of a member."""
        self.roster = members.hear(self.roster, peer, now)
        try:
            return self._handle(peer, message, now)
        except (ArrivalRefused, GateError, ValueError, KeyError) as error:
            what = type(message).__name__
            self.counts[f"refused {what}"] += 1
            return [(peer, Refused(what, str(error)))]

    def _handle(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        role = self.roster.peers[peer].hello.role
        if not isinstance(message, CALLS[role]):
            raise ValueError(f"{peer} is a {role} and may not send this")
        match message:
            case said.OpenTurn():
                return self._open(peer, message, now)
            case said.Generated():
                return self._acted(message)
            case said.GenerateFailed():
                return self._not_generated(message)
            case said.EpisodeEnded():
                return self._ended(peer, message, now)
            case said.Arrive():
                return self._own(peer, message.run).arrive(message, now)
            case said.Operate():
                return self._own(peer, message.run).operate(message)
            case said.WorkerDone() if message.run in self.runs:
                return self.runs[message.run].done(message)
            case said.WorkerFailed() if message.run in self.runs:
                return self.runs[message.run].failed(message)
            case said.Loaded() if message.run in self.runs:
                return self.runs[message.run].loaded(message, now) + self._route_waiting()
            case said.LoadFailed() if message.run in self.runs:
                reason = f"it could not load {message.version}: {message.reason}"
                return self._out_of_service(message.worker, reason, now, only=message.run)
            case said.WorkerLost():
                return self._worker_lost(message.worker, message.reason, now)
            case said.Submit():
                return self._submit(peer, message.spec, now)
            case said.EndRun():
                self._own(peer, message.run)
                return self._end(message.run)
            case said.Bye():
                return self.lose(peer, f"it left: {message.reason}", now)
            case said.Heartbeat():
                return []
            case said.Hello():
                raise ValueError(f"{peer} is a member already; one Hello for each connection")
            case _:
                self.counts["late messages of ended runs"] += 1
                return []

    # --- runs ---

    def _submit(self, peer: PeerName, spec: said.RunSpec, now: float) -> Sends:
        if spec.run in self.runs or spec.run in self.queue:
            raise ValueError(f"run {spec.run} exists already; submit under another id")
        rnd.begin(spec)
        self.queue[spec.run] = (spec, peer)
        return self._admit(spec.run, now) or [(peer, Queued(spec.run, self._why_queued(spec)))]

    def _why_queued(self, spec: said.RunSpec) -> str:
        servers = [peer.hello for peer in self.roster.peers.values() if peer.hello.model is not None]
        if not servers:
            return "no task server has joined; start one with `opentinker taskserver`"
        held = ", ".join(sorted({hello.model.name for hello in servers if hello.model is not None}))
        return (
            f"no task server with a rollout and an update pool holds model {spec.model[:12] or 'any'} (there: {held})"
        )

    def _admit(self, run_id: RunId, now: float) -> Sends:
        """Start a queued run if somebody can serve it."""
        spec, host = self.queue[run_id]
        servers = members.task_servers(self.roster, spec.model)
        rollout = self.roster.workers(servers, PoolKind.ROLLOUT)
        update = self.roster.workers(servers, PoolKind.UPDATE)
        forward = self.roster.workers(servers, PoolKind.FORWARD)
        if not rollout or not update:
            return []
        del self.queue[run_id]
        owners = {w.name: self.roster.owner(w.name) or PeerName("") for w in (*rollout, *update, *forward)}
        serving = Versions(workers=frozenset(worker.name for worker in rollout))
        updater, scorer = update[0].name, forward[0].name if forward else None
        self.runs[run_id] = Run(
            spec, host, rnd.begin(spec), serving, owners, updater, scorer, gathering_since=now, noticed=now
        )
        server = self.roster.peers[owners[updater]].hello
        assert server.model is not None
        return [(host, Admitted(run_id, server.model, server.tokenizer, server.data, server.machine))]

    def _end(self, run_id: RunId) -> Sends:
        """Free everything that belongs to the run."""
        run = self.runs.pop(run_id)
        sends: Sends = []
        for key in [key for key in self.tables if key[0] == run_id]:
            sends += self._clear(self.tables.pop(key))
        return sends + [(server, Release(run_id)) for server in run.servers()]

    def _stop(self, run_id: RunId, reason: str) -> Sends:
        host = self.runs[run_id].host
        return [*self._end(run_id), (host, RunStopped(run_id, reason))]

    def _own(self, peer: PeerName, run_id: RunId) -> Run:
        run = self.runs.get(run_id)
        if run is None or run.host != peer:
            raise ValueError(f"{peer} has no run {run_id!r} here; it has ended, or another host submitted it")
        return run

    # --- turns ---

    def _open(self, peer: PeerName, message: said.OpenTurn, now: float) -> Sends:
        run = self._own(peer, message.turn.run)
        episode = message.turn.episode
        refusal = next(filter(None, (run.admits(episode, each.policy) for each in message.requests)), "")
        key = (run.spec.run, episode)
        table = self.tables.get(key) or Table(run.spec.run, episode)
        try:
            after = gate.open_turn(table, message, now) if not refusal else table
        except GateError as error:
            refusal = str(error)
        if refusal:
            self.counts["refused OpenTurn"] += 1
            return [(peer, TurnRefused(message.turn, refusal))]
        if after is table:  # a repeated message: the stored answer, if the turn has closed
            stored = table.closed
            return [(peer, stored)] if stored is not None and stored.turn == message.turn else []
        self.tables[key] = after
        self.counts["turns"] += 1
        return self._route(key)

    def _route(self, key: tuple[RunId, EpisodeId]) -> Sends:
        """Send every request of the table that is nowhere to a worker that serves its version."""
        table, run = self.tables[key], self.runs[key[0]]
        sends: Sends = []
        for admission in table.turn.waiting if table.turn else ():
            request = admission.request
            if admission.worker is not None:
                continue
            worker = choose(run.versions.serving(request.policy), table.sticky.get(request.seat), self.in_flight)
            if worker is None:
                continue
            assert table.turn is not None
            self.in_flight[worker] += 1
            turn = table.id(table.turn.number)
            table = gate.place(table, request.seat, worker)
            generate = Generate(
                turn, request.seat, worker, request.policy, request.prompt, request.sampling, run.spec.turn_deadline
            )
            sends.append((run.owners[worker], generate))
        self.tables[key] = table
        return sends

    def _route_waiting(self) -> Sends:
        return [send for key in tuple(self.tables) for send in self._route(key)]

    def _acted(self, message: said.Generated) -> Sends:
        key = (message.turn.run, message.turn.episode)
        table = self.tables.get(key)
        if table is None:
            self.counts["late answers"] += 1
            return []
        try:
            after, closed = gate.act(table, message)
        except GateError:
            self.counts["refused answers"] += 1
            return self._not_generated(
                said.GenerateFailed(message.turn, message.seat, message.worker, "it answered something else than asked")
            )
        self._answered(message.worker)
        return self._store(key, after, closed)

    def _not_generated(self, message: said.GenerateFailed) -> Sends:
        key = (message.turn.run, message.turn.episode)
        table = self.tables.get(key)
        if table is None:
            return []
        after, closed = gate.fail(table, message.turn, message.seat, message.worker, message.reason)
        if after is table:
            return []
        self._answered(message.worker)
        return self._store(key, after, closed) + self._route(key)

    def _answered(self, worker: WorkerName) -> None:
        self.in_flight[worker] = max(0, self.in_flight[worker] - 1)

    def _store(self, key: tuple[RunId, EpisodeId], table: Table, closed: TurnClosed | None) -> Sends:
        self.tables[key] = table
        return [(self.runs[key[0]].host, closed)] if closed is not None else []

    def _ended(self, peer: PeerName, message: said.EpisodeEnded, now: float) -> Sends:
        run = self._own(peer, message.run)
        table = self.tables.pop((message.run, message.episode), None)
        sends = self._clear(table) if table is not None else []
        return sends + run.account(message.episode, message.ended, now)

    def _clear(self, table: Table) -> Sends:
        """The table is over: nobody waits for its requests, its caches may go."""
        sends: Sends = []
        for admission in table.turn.waiting if table.turn else ():
            if admission.worker is not None and table.turn is not None:
                sends += self._cancel(table, table.turn.number, admission)
        owners = {self.roster.owner(worker) for worker in table.sticky.values()} - {None}
        return sends + [(owner, Forget(table.run, table.episode)) for owner in sorted(filter(None, owners))]

    def _cancel(self, table: Table, number: int, admission: gate.Admission) -> Sends:
        assert admission.worker is not None
        self._answered(admission.worker)
        owner = self.roster.owner(admission.worker)
        cancel = Cancel(table.id(number), admission.request.seat, admission.worker)
        return [(owner, cancel)] if owner is not None else []

    # --- losses and time ---

    def lose(self, peer: PeerName, reason: str, now: float) -> Sends:
        """A member is gone. Its workers are out of service; runs it submitted end."""
        if peer not in self.roster.peers:
            return []
        hello = self.roster.peers[peer].hello
        sends: Sends = []
        for worker in hello.workers:
            sends += self._worker_lost(worker.name, f"task server {peer} is gone ({reason})", now)
        for run_id in [run_id for run_id, run in self.runs.items() if run.host == peer]:
            sends += self._end(run_id)
        self.queue = {run_id: queued for run_id, queued in self.queue.items() if queued[1] != peer}
        self.roster = members.leave(self.roster, peer)
        return [(to, message) for to, message in sends if to != peer]

    def _worker_lost(self, worker: WorkerName, reason: str, now: float) -> Sends:
        sends = self._out_of_service(worker, reason, now)
        self.roster = members.drop_worker(self.roster, worker)
        return sends

    def _out_of_service(self, worker: WorkerName, reason: str, now: float, only: RunId | None = None) -> Sends:
        """The worker serves nobody any more (or only not this run). Its requests go to others; without its updater a run ends."""
        sends: Sends = []
        self.counts["workers out of service"] += 1
        for run_id, run in tuple(self.runs.items()):
            if worker not in run.owners or (only is not None and run_id != only):
                continue
            sends += run.lose(worker, now)
            if worker == run.updater:
                sends += self._stop(
                    run_id, f"its update worker {worker} was lost: {reason}. Start it again with --resume"
                )
            elif not run.versions.workers:
                sends += self._stop(run_id, f"its last rollout worker {worker} was lost: {reason}. Start a task server")
            else:
                for key in [key for key in self.tables if key[0] == run_id]:
                    self.tables[key] = gate.lose(self.tables[key], worker)
        if only is None:
            self.in_flight.pop(worker, None)
        return sends + self._route_waiting()

    def tick(self, now: float) -> Sends:
        """Time has passed: close turns past their deadline, say who is missing, give up members that went silent."""
        sends: Sends = []
        for key, table in tuple(self.tables.items()):
            after, closed, given_up = gate.expire(table, now)
            if closed is None:
                continue
            self.counts["turns past their deadline"] += 1
            for admission in given_up:
                sends += self._cancel(table, closed.turn.number, admission)
            sends += self._store(key, after, closed)
        for run in self.runs.values():
            if now - run.noticed >= NOTICE and not run.rounds.finished:
                run.noticed = now
                here = tuple(name for name, _ in run.rounds.barrier.arrived)
                missing = Missing(run.spec.run, *run.rounds.at, here, rnd.missing(run.rounds))
                sends.append((run.host, missing))
        for peer in members.silent(self.roster, now - 2 * self.lease):
            sends += self.lose(peer, f"not heard for {2 * self.lease:.0f} s", now)
        return sends

    def violations(self) -> list[str]:
        """Which invariants the present state breaks; [] if all hold."""
        found = members.violations(self.roster)
        for run in self.runs.values():
            found += run.violations()
        for key, table in self.tables.items():
            found += gate.violations(table)
            if key[1] not in self.runs[key[0]].rounds.unaccounted:
                found.append("a table outlives its episode")
        held = Counter(a.worker for t in self.tables.values() if t.turn for a in t.turn.waiting if a.worker)
        if {w: n for w, n in self.in_flight.items() if n} != dict(held):
            found.append("requests in flight are miscounted")
        return found


__all__ = ["Coordinator", "MemberRefused"]
