"""The whole coordinator as one deterministic machine: messages and time in, messages to send out.

It composes the parts: roster, queue of runs, runs (rounds, update order, versions, operations) and turns (tables, routing). No await, no
clock, no randomness: the same sequence of `join`, `step`, `lose` and `tick` calls gives the same states and the same messages (I8).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from coordinator.core import roster as members
from coordinator.core import rounds as rnd
from coordinator.core.roster import CALLS, OF_WORKER, MemberRefused, OfWorker, Roster
from coordinator.core.rounds import ArrivalRefused
from coordinator.core.run import Run, Sends
from coordinator.core.turns import Turns
from coordinator.core.versions import Versions, WrongWeights
from tinker.protocol import to_coordinator as said
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_host import Admitted, Missing, Queued, RunStopped, TurnRefused
from tinker.protocol.to_taskserver import Release
from tinker.protocol.values import PeerName, PoolKind, RunId, WorkerName

FRESH = 1 / 256  # of a lease: renewed so recently, it is not renewed again
NOTICE = 10.0  # seconds between notices of who a shut barrier waits for


@dataclass(slots=True)
class Coordinator:
    """`lease`: a member silent for two leases is lost. `ended`: runs that are over, while their host is a member (in order; an
    old `Submit` that comes again must not start them twice). `counts`: refusals and totals, by name. `draining`: why nothing new may
    begin ("": it may)."""

    name: PeerName
    epoch: int = 1
    lease: float = 15.0
    roster: Roster = field(default_factory=Roster)
    queue: dict[RunId, tuple[said.RunSpec, PeerName]] = field(default_factory=dict)
    runs: dict[RunId, Run] = field(default_factory=dict)
    ended: dict[tuple[RunId, PeerName], None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    draining: str = ""
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.counts)

    def join(self, hello: said.Hello, now: float) -> Sends:
        """A new member. MemberRefused if its name is taken."""
        self.roster = members.join(self.roster, hello, now)
        sends: Sends = [(hello.name, Welcome(self.name, self.epoch, self.lease))]
        if hello.model is not None:
            for run in self.runs.values():
                if hello.model.digest == run.model:
                    for worker in self.roster.workers((hello.name,), PoolKind.ROLLOUT):
                        sends += run.join(worker.name, hello.name)
            for waiting in tuple(self.queue):
                sends += self._admit(waiting, now)
        return sends

    def step(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        """One message of a member. What may not be is answered with `Refused`, counted, and changes nothing."""
        try:
            return self._heard(peer, message, now)
        except (ArrivalRefused, ValueError) as error:
            what = type(message).__name__
            self.counts[f"refused {what}"] += 1
            return [(peer, Refused(what, str(error)))]

    def _heard(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        """Check who may say this, before anybody acts on it."""
        member = self.roster.peers.get(peer)
        if member is None:
            raise ValueError(f"{peer} is no member (given up after silence?); connect again and say Hello first")
        if now - member.heard > FRESH * self.lease:
            self.roster = members.hear(self.roster, peer, now)
        role, kind = member.hello.role, type(message)
        if kind not in CALLS[role]:
            raise ValueError(f"{peer} is a {role} and may not send this")
        if kind in OF_WORKER:
            worker = cast(OfWorker, message).worker
            owner = self.roster.owner(worker)
            if owner is None:
                self.counts["messages of lost workers"] += 1
                return []
            if owner != peer:
                raise ValueError(f"worker {worker} belongs to {owner}, not to {peer}")
        return self._handle(peer, message, now)

    def _handle(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        match message:
            case said.OpenTurn():
                run = self.runs.get(message.turn.run)
                if run is None or run.host != peer:
                    self.counts["refused OpenTurn"] += 1
                    return [(peer, TurnRefused(message.turn, _no_run(peer, message.turn.run)))]
                if self.draining:
                    self.counts["refused OpenTurn"] += 1
                    return [(peer, TurnRefused(message.turn, self.draining))]
                return self.turns.open(run, message, now)
            case said.Generated() if message.turn.run in self.runs:
                return self.turns.acted(self.runs[message.turn.run], message, now)
            case said.GenerateFailed() if message.turn.run in self.runs:
                return self.turns.failed(self.runs[message.turn.run], message, now)
            case said.EpisodeEnded():
                run = self._own(peer, message.run)
                if message.episode not in run.rounds.unaccounted:
                    self.counts["repeated EpisodeEnded"] += 1
                return self.turns.clear(run, message.episode) + run.account(message.episode, message.ended, now)
            case said.Arrive():
                return self._own(peer, message.run).arrive(message, now)
            case said.Operate():
                return self._own(peer, message.run).operate(message)
            case said.WorkerDone() if message.run in self.runs:
                return self.runs[message.run].done(message)
            case said.WorkerFailed() if message.run in self.runs:
                return self.runs[message.run].failed(message)
            case said.Loaded() if message.run in self.runs:
                return self._loaded(self.runs[message.run], message, now)
            case said.LoadFailed() if message.run in self.runs:
                reason = f"it could not load {message.version}: {message.reason}"
                return self._out_of_service(message.worker, reason, now, only=message.run)
            case said.WorkerLost():
                return self._worker_lost(message.worker, message.reason, now)
            case said.Submit():
                return self._submit(peer, message.spec, now)
            case said.EndRun():
                if message.run in self.queue and self.queue[message.run][1] == peer:
                    del self.queue[message.run]
                    self.ended[message.run, peer] = None
                    return []
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
        waiting, run = self.queue.get(spec.run), self.runs.get(spec.run)
        if waiting == (spec, peer):
            return [(peer, Queued(spec.run, self._why_queued(spec)))]
        if run is not None and (run.spec, run.host) == (spec, peer):
            return [(peer, run.admitted)]
        if waiting is not None or run is not None or (spec.run, peer) in self.ended:
            raise ValueError(f"run {spec.run} exists already, or has ended; submit under another id")
        if self.draining:
            raise ValueError(f"no run is admitted any more: {self.draining}")
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
        """Start a queued run if somebody can serve it: the first model that has a rollout and an update worker."""
        spec, host = self.queue[run_id]
        for model in (spec.model,) if spec.model else members.models(self.roster):
            servers = members.task_servers(self.roster, model)
            rollout = self.roster.workers(servers, PoolKind.ROLLOUT)
            update = self.roster.workers(servers, PoolKind.UPDATE)
            forward = self.roster.workers(servers, PoolKind.FORWARD)
            if not rollout or not update:
                continue
            owners = {w.name: owner for w in (*rollout, *update, *forward) if (owner := self.roster.owner(w.name))}
            serving = Versions(workers=frozenset(worker.name for worker in rollout))
            updater, scorer = update[0].name, forward[0].name if forward else None
            server = self.roster.peers[owners[updater]].hello
            assert server.model is not None
            admitted = Admitted(run_id, server.model, server.tokenizer, server.data, server.machine)
            run = Run(spec, host, rnd.begin(spec), serving, owners, updater, scorer, admitted, noticed=now, since=now)
            self.runs[run_id] = run
            del self.queue[run_id]
            return [(host, admitted)]
        return []

    def _end(self, run_id: RunId) -> Sends:
        """Free everything that belongs to the run."""
        run = self.runs.pop(run_id)
        self.ended[run_id, run.host] = None
        sends = self.turns.clear_run(run)
        return sends + [(server, Release(run_id)) for server in run.servers()]

    def _stop(self, run_id: RunId, reason: str) -> Sends:
        host = self.runs[run_id].host
        return [*self._end(run_id), (host, RunStopped(run_id, reason))]

    def _own(self, peer: PeerName, run_id: RunId) -> Run:
        run = self.runs.get(run_id)
        if run is None or run.host != peer:
            raise ValueError(_no_run(peer, run_id))
        return run

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
        self.ended = {(run_id, host): None for run_id, host in self.ended if host != peer}
        self.queue = {run_id: queued for run_id, queued in self.queue.items() if queued[1] != peer}
        self.roster = members.leave(self.roster, peer)
        return [(to, message) for to, message in sends if to != peer]

    def _worker_lost(self, worker: WorkerName, reason: str, now: float) -> Sends:
        sends = self._out_of_service(worker, reason, now)
        self.roster = members.drop_worker(self.roster, worker)
        return sends

    def _loaded(self, run: Run, message: said.Loaded, now: float) -> Sends:
        try:
            return run.loaded(message, now) + self.turns.route(run, now)
        except WrongWeights as error:  # it would serve something else than was asked for (I9)
            return self._out_of_service(message.worker, str(error), now, only=message.run)

    def _out_of_service(self, worker: WorkerName, reason: str, now: float, only: RunId | None = None) -> Sends:
        """The worker serves nobody any more (or only not this run). Its requests go to others; without its updater a run ends."""
        sends: Sends = []
        for run_id, run in tuple(self.runs.items()):
            if worker not in run.owners or (only is not None and run_id != only):
                continue
            self.counts["workers out of service"] += 1
            cancels = self.turns.withdraw(run, worker)
            sends += cancels if only is not None else []  # a lost worker has nothing to cancel
            sends += run.lose(worker, now)
            if worker == run.updater:
                lost = f"its update worker {worker} was lost: {reason}"
                sends += self._stop(
                    run_id, f"{lost}. Published versions are kept; mend the task server and submit a new run"
                )
            elif not run.versions.workers:
                sends += self._stop(
                    run_id,
                    f"its last rollout worker {worker} was lost: {reason}. Start a task server and submit a new run",
                )
            else:
                sends += self.turns.route(run, now)
        if only is None:
            self.turns.in_flight.pop(worker, None)
        return sends

    def tick(self, now: float) -> Sends:
        """Time has passed: close turns past their deadline, say who is missing, give up members that went silent."""
        sends = self.turns.expire(self.runs, now)
        for run in self.runs.values():
            if now - run.noticed >= NOTICE and not run.rounds.finished:
                run.noticed = now
                here = tuple(name for name, _ in run.rounds.barrier.arrived)
                missing = Missing(run.spec.run, *run.rounds.at, here, rnd.missing(run.rounds))
                sends.append((run.host, missing))
        for peer in members.silent(self.roster, now - 2 * self.lease):
            sends += self.lose(peer, f"not heard for {2 * self.lease:.0f} s", now)
        return sends

    def drain(self, reason: str) -> Sends:
        """From now on no run is admitted and no turn opened; everybody is told why. Runs in the queue are over."""
        self.draining = reason
        sends: Sends = [(peer, Draining(reason)) for peer in self.roster.peers]
        for run_id, (_, host) in self.queue.items():
            self.ended[run_id, host] = None
            sends.append((host, RunStopped(run_id, reason)))
        self.queue = {}
        return sends

    def close(self) -> Sends:
        """End every run that is left, before the coordinator does."""
        return [send for run_id in tuple(self.runs) for send in self._stop(run_id, self.draining)]

    def violations(self) -> list[str]:
        """Which invariants the present state breaks; [] if all hold."""
        found = members.violations(self.roster)
        for run in self.runs.values():
            found += run.violations()
        return found + self.turns.violations(self.runs)


def _no_run(peer: PeerName, run_id: RunId) -> str:
    return f"{peer} has no run {run_id!r} here; it has ended, or another host submitted it"


__all__ = ["Coordinator", "MemberRefused"]
