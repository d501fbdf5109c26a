"""The whole coordinator as one deterministic machine: messages and time in, messages to send out.

It composes the parts: roster, queue of runs, runs (rounds, update order, versions, operations) and turns (tables, routing). No await, no
clock, no randomness: the same sequence of `join`, `step`, `lose` and `tick` calls gives the same states and the same messages (I8).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import cast

from coordinator.core import roster as members
from coordinator.core import rounds as rnd
from coordinator.core import updates as upd
from coordinator.core.deadlines import rule_of, shut
from coordinator.core.roster import CALLS, OF_WORKER, MemberRefused, OfWorker, Roster
from coordinator.core.rounds import ArrivalRefused
from coordinator.core.run import Found, Run, Sends
from coordinator.core.surplus import surplus
from coordinator.core.turns import Turns
from coordinator.core.versions import Versions, WrongWeights
from tinker.protocol import to_coordinator as said
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_host import Admitted, Missing, Queued, RunStopped, TurnRefused
from tinker.protocol.to_taskserver import Release
from tinker.protocol.values import PeerName, PoolKind, RunId, WorkerName

RULES = 11  # raise it when the same inputs would lead to other states or messages: old journals are not folded then
FRESH = 1 / 256  # of a lease: renewed so recently, it is not renewed again
REJOIN = 60.0  # seconds that members of before have to say Hello again after a restart
BY_HOST = "its learner host has ended it"
REMEMBERED = 16  # runs that were stopped
NOTICE = 10.0  # seconds between notices of who a shut barrier waits for


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that its learner host did not end itself."""

    run: RunId
    scenario: str
    host: PeerName
    reason: str


@dataclass(slots=True)
class Coordinator:
    """`lease`: a member silent for two leases is lost. `ended`: runs that are over, while their host is a member (in order; an old
    `Submit` that comes again must not start them twice), with the reason if it was not the host that ended them; `stopped`: the last of
    those. `counts`: refusals and
    totals, by name. `draining`: why nothing new may begin ("": it may)."""

    name: PeerName
    epoch: int = 1
    lease: float = 15.0
    roster: Roster = field(default_factory=Roster)
    queue: dict[RunId, tuple[said.RunSpec, PeerName]] = field(default_factory=dict)
    runs: dict[RunId, Run] = field(default_factory=dict)
    ended: dict[tuple[RunId, PeerName], str] = field(default_factory=dict)
    stopped: tuple[StoppedRun, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    draining: str = ""
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.counts)

    def join(self, hello: said.Hello, now: float) -> Sends:
        """A new member, or one that is back after a restart. MemberRefused if its name is taken."""
        members.check(self.roster, hello)
        sends: Sends = []
        before = members.replaced(self.roster, hello)
        if before is not None:
            sends += self.lose(hello.name, f"process {before.pid} is gone, {hello.pid} has taken its name", now)
        self.roster = members.join(self.roster, hello, now)
        self.turns.cut -= {worker.name for worker in hello.workers}
        sends.append((hello.name, Welcome(self.name, self.epoch, self.lease)))
        for run in self.runs.values():
            sends += run.dealing.reach(hello.name, True)
        return sends + (self._serve(hello, now) if hello.model is not None else [])

    def _serve(self, hello: said.Hello, now: float) -> Sends:
        """A task server is there (again): its workers serve the runs of its model, and it hears what it may have missed."""
        sends: Sends = []
        offered = {worker.name for worker in hello.workers}
        gone = {w for run in self.runs.values() for w, owner in run.owners.items() if owner == hello.name} - offered
        for worker in sorted(gone):
            sends += self._worker_lost(worker, f"task server {hello.name} offers it no longer", now)
        for run in self.runs.values():
            if hello.model is not None and hello.model.digest == run.model:
                for each in self.roster.workers((hello.name,), PoolKind.ROLLOUT):
                    sends += run.join(each.name, hello.name, hello.holding)
                sends += run.ask_again(hello.name) + run.settle(now)
                sends += self.turns.ask_again(run, hello.name, now) + self._staff(run, now)
        over = {held.run for held in hello.holding} - set(self.runs)
        sends += [(hello.name, Release(run_id)) for run_id in sorted(over)]
        for waiting in tuple(self.queue):
            sends += self._admit(waiting, now)
        return sends

    def restart(self, epoch: int, now: float, lease: float = 0.0) -> Sends:
        """Go on after a crash, from the state that was folded: nobody is a member until it says Hello again, open turns are forgotten
        (their hosts open them again). `lease`: from now on (0: as before). ValueError unless the epoch rises."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not rise: the last one was {self.epoch}")
        self.epoch, self.draining, self.lease = epoch, "", lease or self.lease
        self.roster = members.restart(self.roster, now + REJOIN)
        self.turns = Turns(self.counts)
        for run in self.runs.values():
            run.restart(now)
        return []

    def step(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        """One message of a member. What may not be is answered with `Refused`, counted, and changes nothing."""
        try:
            return self._heard(peer, message, now)
        except (ArrivalRefused, ValueError) as error:
            what = type(message).__name__
            self.counts[f"refused {what}"] += 1
            return [(peer, Refused(what, str(error), stranger=not self._reachable(peer)))]

    def _heard(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Sends:
        """Check who may say this, before anybody acts on it."""
        member = self.roster.peers.get(peer)
        if member is None or member.closed is not None:
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
        stopped = self.ended.get((_run_of(message), peer)) if self.ended else None
        if stopped:  # it may have missed that
            return [(peer, RunStopped(_run_of(message), stopped, stopped == BY_HOST))]
        match message:
            case said.OpenTurn():
                run = self.runs.get(message.turn.run)
                if run is None or peer not in run.dealing.hosts:
                    self.counts["refused OpenTurn"] += 1
                    return [(peer, TurnRefused(message.turn, _no_run(peer, message.turn.run), run is not None))]
                if self.draining and not self.turns.knows(message.turn):
                    self.counts["refused OpenTurn"] += 1
                    return [(peer, TurnRefused(message.turn, self.draining))]
                return self.turns.open(run, peer, message, now)
            case said.Generated() if message.turn.run in self.runs:
                return self.turns.acted(self.runs[message.turn.run], message, now)
            case said.GenerateFailed() if message.turn.run in self.runs:
                return self.turns.failed(self.runs[message.turn.run], message, now)
            case said.EpisodeEnded():
                run = self._own(peer, message.run)
                if message.episode not in run.rounds.unaccounted:
                    self.counts["repeated EpisodeEnded"] += 1
                return self.turns.clear(run, message.episode) + run.account(message.episode, message.ended, now)
            case said.Arrive() | said.Arrivals():
                return self._own(peer, message.run).arrive(message, now)
            case said.Operate():
                return self._operate(self._own(peer, message.run), message)
            case said.WorkerDone() | said.WorkerFailed() if message.run in self.runs:
                run = self.runs[message.run]
                if message.op not in run.pending:
                    self.counts["late results"] += 1
                return run.done(message) if isinstance(message, said.WorkerDone) else run.failed(message)
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
                    self.ended[message.run, peer] = ""
                    return []
                self._own(peer, message.run)
                return self._end(message.run, BY_HOST)
            case said.Enlist():
                return self._enlist(peer, message)
            case said.Retire():
                return self._playing(peer, message.run).dealing.retire(peer)
            case said.InHand():
                return self._playing(peer, message.run).dealing.in_hand(peer, message.deals)
            case said.Played():
                run = self._playing(peer, message.run)
                sends = run.played(peer, message)
                if sends is None:
                    self.counts["late episodes"] += len(message.episodes)
                    return run.not_yours(peer, message)
                return sends
            case said.Bye():
                return self.lose(peer, f"it left: {message.reason}", now)
            case said.Heartbeat():
                return surplus(self.runs, peer, message) if message.runs or message.holding else []
            case said.Hello():
                return self._hello_again(peer, message, now)
            case _:
                self.counts["late messages of ended runs"] += 1
                return []

    def _operate(self, run: Run, message: said.Operate) -> Sends:
        known = message.op in run.outcomes
        sends = run.operate(message)
        if message.op in run.outcomes and not known:
            self.counts["refused Operate"] += 1
        return sends

    def _hello_again(self, peer: PeerName, hello: said.Hello, now: float) -> Sends:
        """Its Hello, or our Welcome, may have been lost; or it has lost us and joins under a new incarnation."""
        known = self.roster.peers[peer].hello
        if hello.name != peer or not members.same_process(known, hello):
            raise ValueError(f"{peer} is a member already and says Hello as {hello.name}; one name for each connection")
        if hello.incarnation > known.incarnation:
            return self.join(hello, now)
        self.counts["repeated Hello"] += 1
        return [(peer, Welcome(self.name, self.epoch, self.lease))] if hello.incarnation == known.incarnation else []

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
        return f"no task server with a rollout and an update pool holds model {spec.model or 'any'} (there: {held})"

    def _admit(self, run_id: RunId, now: float) -> Sends:
        """Start a queued run if somebody can serve it: the first model that has a rollout and an update worker."""
        spec, host = self.queue[run_id]
        for model in members.models(self.roster, spec.model):
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
            parts = spec, host, rnd.begin(spec), serving, owners, updater, scorer, admitted
            run = Run(*parts, noticed=now, since=now, updates=upd.begin(spec))
            run.dealing.reach(host, self._reachable(host))
            self.runs[run_id] = run
            del self.queue[run_id]
            return [(host, admitted)]
        return []

    def _end(self, run_id: RunId, reason: str) -> Sends:
        """Free everything that belongs to the run. Its further hosts are told."""
        run = self.runs.pop(run_id)
        self.ended[run_id, run.host] = ""
        self.ended |= {(run_id, host): reason for host in run.dealing.further()}
        if reason != BY_HOST:
            stopped = StoppedRun(run_id, run.spec.scenario, run.host, reason)
            self.stopped = (*self.stopped[-REMEMBERED + 1 :], stopped)
        sends = self.turns.clear_run(run) + run.farewell(reason, reason == BY_HOST)
        return sends + [(server, Release(run_id)) for server in run.servers()]

    def _stop(self, run_id: RunId, reason: str) -> Sends:
        host = self.runs[run_id].host
        sends = self._end(run_id, reason)
        self.ended[run_id, host] = reason
        return [*sends, (host, RunStopped(run_id, reason))]

    def _enlist(self, peer: PeerName, message: said.Enlist) -> Sends:
        """A further host plays with, or waits with the run in the queue."""
        if message.run in self.queue:
            return [(peer, Queued(message.run, self._why_queued(self.queue[message.run][0])))]
        if message.run not in self.runs:
            there = ", ".join(sorted({*self.runs, *self.queue})) or "none"
            raise ValueError(f"there is no run {message.run!r} here; there are: {there}")
        return self.runs[message.run].enlist(peer, message)

    def _playing(self, peer: PeerName, run_id: RunId) -> Run:
        run = self.runs.get(run_id)
        if run is None or peer not in run.dealing.hosts:
            raise ValueError(f"{peer} plays nothing of run {run_id!r}; enlist first")
        return run

    def _own(self, peer: PeerName, run_id: RunId) -> Run:
        run = self.runs.get(run_id)
        if run is None or run.host != peer:
            raise ValueError(_no_run(peer, run_id))
        return run

    def _reachable(self, peer: PeerName) -> bool:
        member = self.roster.peers.get(peer)
        return member is not None and member.closed is None

    # --- losses and time ---

    def part(self, peer: PeerName, now: float) -> Sends:
        """A member's connection was closed. It may be back before its lease ends, so its work waits; nothing new is given to it."""
        if self._reachable(peer):
            self.counts["connections closed"] += 1
            self.roster = members.part(self.roster, peer, now)
            self.turns.cut |= {worker.name for worker in self.roster.peers[peer].hello.workers}
            for run in self.runs.values():
                run.dealing.reach(peer, False)
        return []

    def lose(self, peer: PeerName, reason: str, now: float) -> Sends:
        """A member is gone. Its workers are out of service; runs it submitted end."""
        member = self.roster.peers.get(peer) or self.roster.away.get(peer)
        if member is None:
            return []
        hello = member.hello
        sends: Sends = []
        for worker in hello.workers:
            sends += self._worker_lost(worker.name, f"task server {peer} is gone ({reason})", now)
        for run_id in [run_id for run_id, run in self.runs.items() if run.host == peer]:
            lost = f"its learner host {peer} is gone ({reason})"
            sends += self._end(run_id, f"{lost}; what it had finished lies in its run directory, submit a new run")
        for run in self.runs.values():
            sends += self._host_lost(run, peer)
        self.ended = {key: why for key, why in self.ended.items() if key[1] != peer}
        self.queue = {run_id: queued for run_id, queued in self.queue.items() if queued[1] != peer}
        self.roster = members.leave(self.roster, peer)
        return [(to, message) for to, message in sends if to != peer]

    def _host_lost(self, run: Run, host: PeerName) -> Sends:
        """What a further host had in hand is played again by others, from the start of each episode."""
        again, dealt = run.dealing.lose(host)
        if again:
            self.counts["episodes dealt again"] += len(again)
        return [send for episode in again for send in self.turns.clear(run, episode)] + dealt

    def _worker_lost(self, worker: WorkerName, reason: str, now: float) -> Sends:
        sends = self._out_of_service(worker, reason, now)
        for run in self.runs.values():  # whoever has its name next is another one
            run.spurned -= {worker}
        self.roster = members.drop_worker(self.roster, worker)
        self.turns.cut -= {worker}
        return sends

    def _loaded(self, run: Run, message: said.Loaded, now: float) -> Sends:
        try:
            return run.loaded(message, now) + self.turns.route(run, now)
        except WrongWeights as error:  # it would serve something else than was asked for (I9)
            return self._out_of_service(message.worker, str(error), now, only=message.run)

    def _out_of_service(self, worker: WorkerName, reason: str, now: float, only: RunId | None = None) -> Sends:
        """The worker serves nobody any more (or only not this run). Its requests and operations go to others."""
        sends: Sends = []
        for run_id, run in tuple(self.runs.items()):
            if worker not in run.owners or (only is not None and run_id != only):
                continue
            self.counts["workers out of service"] += 1
            cancels = self.turns.withdraw(run, worker)
            sends += cancels if only is not None else []  # a lost worker has nothing to cancel
            sends += run.lose(worker, now)
            sends += self._staff(run, now, worker, reason)
        if only is None:
            self.turns.in_flight.pop(worker, None)
        return sends

    def _staff(self, run: Run, now: float, lost: WorkerName | None = None, reason: str = "") -> Sends:
        """Living workers take the places of those that the run has lost, and what those had is given to them. A run that lacks a worker
        waits for one as long as it may, or stops. `lost`: the worker that has just gone, and why."""
        servers = members.task_servers(self.roster, run.model)
        free: list[Found] = []
        for kind in (PoolKind.UPDATE, PoolKind.FORWARD):
            names = (each.name for each in self.roster.workers(servers, kind))
            living = [name for name in names if name != lost and name not in run.spurned | self.turns.cut]
            free.append((living[0], self.roster.owners[living[0]]) if living else None)
        before = run.updater
        sends = run.staff(*free)
        if before is None and run.updater is not None:
            server = self.roster.peers[run.owners[run.updater]].hello
            run.admitted = replace(run.admitted, data=server.data, machine=server.machine)
            sends.insert(0, (run.host, run.admitted))
        lacks, was = run.lacks, run.lacking
        if lost is not None and lacks:
            run.why = f"its last {lacks} {lost} was lost: {reason}"
        run.lacking = None if not lacks else now if was is None else was
        if lacks and not run.spec.worker_deadline:
            return sends + self._lacks(run, now)
        return sends + self.turns.route(run, now)

    def _lacks(self, run: Run, now: float) -> Sends:
        """Stop a run that lacks a worker, once it has waited as long as it may."""
        if run.lacking is None or now - run.lacking < run.spec.worker_deadline:
            return []
        waited = f", and no other has come in {now - run.lacking:.0f} s" if run.spec.worker_deadline else ""
        remedy = "Published versions are kept; start a task server and submit a new run, or resume this one"
        return self._stop(run.spec.run, f"{run.why}{waited}. {remedy}")

    def _late_operations(self, run: Run, now: float) -> Sends:
        """Give up the workers that have not done what they were asked by its deadline."""
        sends: Sends = []
        for worker, asked in sorted(run.overdue(now).items()):
            self.counts["operations past their deadline"] += 1
            run.spurned |= {worker}
            what = f"{type(asked.operation).__name__} of {asked.agent}"
            why = f"{what} was not done in {run.spec.operation_deadline:g} s (operation_deadline)"
            sends += self._out_of_service(worker, why, now, only=run.spec.run)
        return sends

    def tick(self, now: float) -> Sends:
        """Time has passed: close turns past their deadline, say who is missing, give up members that went silent."""
        sends = self.turns.expire(self.runs, now)
        for run in tuple(self.runs.values()):
            sends += self._overdue(run, now)
        for run in tuple(self.runs.values()):
            sends += self._late_operations(run, now)
        for run in tuple(self.runs.values()):
            sends += self._lacks(run, now)
        for run in self.runs.values():
            if now - run.noticed >= NOTICE and not run.rounds.finished:
                sends += _notice(run, now)
        for peer in members.silent(self.roster, now - 2 * self.lease):
            sends += self.lose(peer, f"not heard for {2 * self.lease:.0f} s", now)
        for peer in [name for name, away in self.roster.away.items() if now > away.until]:
            sends += self.lose(peer, f"not back {REJOIN:.0f} s after the coordinator restarted", now)
        return sends

    def _overdue(self, run: Run, now: float) -> Sends:
        """What the rule of the present barrier says, once its deadline has passed."""
        rounds = run.rounds
        rule = rule_of(run.spec, rounds.phase, rounds.edge)
        if rule is None or rounds.finished or now - run.since < rule.deadline:
            return []
        if rule.straggler == said.Straggler.WAIT:
            return _notice(run, now) if run.noticed < run.since + rule.deadline else []
        come = len(rounds.barrier.arrived) if rounds.of_agents else sum(rounds.ended.values())
        if rule.straggler == said.Straggler.FAIL or come < rule.quorum:
            missing = run.missing if rounds.of_agents else tuple(map(str, sorted(rounds.unaccounted)))
            return self._stop(run.spec.run, shut(rule, rounds.round, missing, now - run.since, come))
        what = "dropped agents" if rounds.of_agents else "dropped episodes"
        self.counts[what] += len(rounds.barrier.missing) if rounds.of_agents else len(rounds.unaccounted)
        cleared = [send for episode in sorted(rounds.unaccounted) for send in self.turns.clear(run, episode)]
        return cleared + run.leave_out(now)

    def drain(self, reason: str) -> Sends:
        """From now on no run is admitted and no turn opened; everybody is told why. Runs in the queue are over."""
        self.draining = reason
        sends: Sends = [(peer, Draining(reason)) for peer in self.roster.peers]
        for run_id, (_, host) in self.queue.items():
            self.ended[run_id, host] = reason
            sends.append((host, RunStopped(run_id, reason)))
        self.queue = {}
        return sends

    def close(self) -> Sends:
        """End every run that is left, before the coordinator does."""
        return [send for run_id in tuple(self.runs) for send in self._stop(run_id, self.draining)]

    def violations(self) -> list[str]:
        """Which invariants the present state breaks; [] if all hold."""
        found = members.violations(self.roster)
        closed = [peer.hello for peer in self.roster.peers.values() if peer.closed is not None]
        if self.turns.cut != {worker.name for hello in closed for worker in hello.workers}:
            found.append("M3 the workers that get nothing new are not those that cannot be reached")
        for run in self.runs.values():
            found += run.violations()
            if any(hand.cut is self._reachable(name) for name, hand in run.dealing.hosts.items()):
                found.append("M4 the hosts that are dealt nothing are not those that cannot be reached")
        return found + self.turns.violations(self.runs)


def _run_of(message: said.ToCoordinator) -> RunId:
    """The run a host's message is about ("": none)."""
    match message:
        case said.Submit():
            return message.spec.run
        case said.OpenTurn():
            return message.turn.run
        case said.Arrive() | said.Arrivals() | said.EpisodeEnded() | said.Operate() | said.EndRun():
            return message.run
        case said.Enlist() | said.Retire() | said.InHand() | said.Played():
            return message.run
    return RunId("")


def _notice(run: Run, now: float) -> Sends:
    """Tell the host who its barrier waits for."""
    run.noticed = now
    here = tuple(name for name, _ in run.rounds.barrier.arrived)
    gone = (f"any {run.lacks} ({run.why})",) if run.lacks else ()
    return [(run.host, Missing(run.spec.run, *run.rounds.at, here, (*run.missing, *gone)))]


def _no_run(peer: PeerName, run_id: RunId) -> str:
    return f"{peer} has no run {run_id!r} here; it has ended, or another host submitted it"


__all__ = ["Coordinator", "MemberRefused"]
