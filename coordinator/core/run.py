"""One admitted run: its rounds, its versions, its operations, glued together.

A `Run` mutates itself but is otherwise pure: the same calls give the same states and the same messages. Handlers return what must be
sent, as (receiver, message); receivers are peers' names.

Invariants (checked by `violations`): those of the parts, and
- P0 the groups of a phase hold exactly the episodes that are not accounted for;
- P1 an operation has one outcome (I7); its worker is asked again whenever its host asks again, and does it once;
- P2 weights move only while the update gate admits their agent, and an agent leaves the gate only when nothing moves them any more; when
  an agent is left out, what moves its weights is fenced: it has failed, whatever its worker says later, and nothing is published;
- P4 an operation that is at no worker waits for one that the run lacks;
- P3 an agent whose update was fenced moves its weights again only after they were those of its published version (`Rewind`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat

from coordinator.core import bounds
from coordinator.core import dealing as deals
from coordinator.core import rounds as rnd
from coordinator.core import updates as upd
from coordinator.core import versions as ver
from coordinator.core.dealing import Dealing, Hand
from coordinator.core.dealing import Sends as Sends
from coordinator.core.rounds import ArrivalRefused, Begin, Effect, Rounds
from coordinator.core.updates import GateRefused, Updates
from coordinator.core.versions import Versions
from tinker.protocol.making import maker
from tinker.protocol.operations import (
    Attach,
    LoadState,
    Measured,
    Publish,
    Published,
    Result,
    Rewind,
    Saved,
    SaveState,
    Score,
    Scored,
)
from tinker.protocol.to_coordinator import (
    Arrivals,
    Arrive,
    Enlist,
    Held,
    Loaded,
    Operate,
    Played,
    RunSpec,
    WorkerDone,
    WorkerFailed,
)
from tinker.protocol.to_host import Admitted, Enlisted, OperationDone, OperationFailed, RunStopped, Settled
from tinker.protocol.to_taskserver import Discard, Load, Unload, Work
from tinker.protocol.values import (
    BASE,
    AgentName,
    Edge,
    Ended,
    EpisodeId,
    OpId,
    PeerName,
    Phase,
    PolicyVersion,
    RunId,
    TurnId,
    WorkerName,
)

STORED = 256  # finished operations whose result is kept for a repeated request
NOBODY = WorkerName("")  # has an operation that waits for a worker

Found = tuple[WorkerName, PeerName] | None  # a worker, and whose it is


@dataclass(slots=True)
class Run:
    """`host`: who submitted it and learns; `dealing`: who plays.

    `owners`: which task server each of its workers belongs to. `admitted`: what the
    host was told. `noticed`: when it was last told (or could see) who the barrier waits for. `since`: when the run
    began to gather at this barrier. `fenced`: agents whose weights may be those of an update they were left out of.
    `lacking`: since when it `lacks` a worker, and `why`. `spurned`: workers that it gave up although they live. `given`: when an operation
    was first seen at its worker."""

    spec: RunSpec
    host: PeerName
    rounds: Rounds
    versions: Versions
    owners: dict[WorkerName, PeerName]
    updater: WorkerName | None
    scorer: WorkerName | None
    admitted: Admitted
    pending: dict[OpId, tuple[Operate, WorkerName]] = field(default_factory=dict)
    outcomes: dict[OpId, OperationDone | OperationFailed] = field(default_factory=dict)
    fenced: frozenset[AgentName] = frozenset()
    noticed: float = 0.0
    since: float = 0.0
    updates: Updates = Updates(RunId(""))
    spurned: frozenset[WorkerName] = frozenset()
    lacking: float | None = None
    why: str = ""
    given: dict[OpId, float] = field(default_factory=dict)
    dealing: Dealing = field(init=False)

    def __post_init__(self) -> None:
        self.dealing = Dealing(self.spec.run, self.host, {self.host: Hand(self.spec.capacity)})

    @property
    def lacks(self) -> str:
        """Which kind of worker it has none of and cannot go on without ("": none)."""
        if self.updater is None:
            return "update worker"
        return "" if self.versions.workers else "rollout worker"

    @property
    def model(self) -> str:
        """Digest of the base model that serves it."""
        return self.admitted.model.digest

    @property
    def missing(self) -> tuple[str, ...]:
        """Who the present barrier waits for, in words."""
        if not self.updates.overlap or not self.rounds.of_agents:
            return rnd.missing(self.rounds)
        late = {name: upd.unfinished(self.updates, name) for name in self.rounds.agents}
        why = {name: f" (its update of round {round} has not ended)" for name, round in late.items() if round}
        return tuple(f"{name}{why.get(AgentName(name), '')}" for name in self.rounds.barrier.missing)

    def arrive(self, message: Arrive | Arrivals, now: float) -> Sends:
        """ArrivalRefused, and nobody has arrived, if an agent may not be here, comes with a version that is not its policy's, or still
        moves its weights."""
        if isinstance(message, Arrive):
            at = message.round, message.phase, message.edge
            digests = (message.digest,) if message.digest else ()
            message = Arrivals(message.run, *at, (message.agent,), (message.version,), (message.samples,), digests)
        if self.updates.overlap and message.phase == Phase.UPDATE:
            return self._at_gate(message, now)
        again: list[PolicyVersion] = []
        if (message.round, message.phase, message.edge) == self.rounds.at:
            self._check_versions(message)
            held = self.rounds.held
            names = [name for name in message.agents if name in held] if held else []
            again = [PolicyVersion(self.rounds.agents[name].policy, held[name].version) for name in names]
        quick = (
            not self.versions.loading
            and self.versions.workers
            and bounds.all_newest(message, self.rounds, self.versions)
        )
        ready = rnd.everything if quick else self.versions.loaded
        sends = self._moved(*rnd.arrive(self.rounds, message, ready, now), now)
        return sends + [send for version in again for send in self._load(version)]

    def _at_gate(self, message: Arrivals, now: float) -> Sends:
        """Agents that may lag come to their updates, or are back from them."""
        rnd.check_columns(self.rounds, message)
        samples = message.samples or (0,) * len(message.agents)
        held = {name: number for gate in self.updates.gates for name, number in gate.held.items()}
        try:
            if message.edge == Edge.START:
                rows = dict(zip(message.agents, samples, strict=True))
                self.updates, effects = upd.start(self.updates, message.round, rows)
            else:
                self._check_versions(message)
                numbers = dict(zip(message.agents, message.versions, strict=True))
                self.updates, effects = upd.end(self.updates, message.round, numbers, self.versions.loaded)
        except GateRefused as error:
            raise ArrivalRefused(str(error)) from error
        loading = [PolicyVersion(self.rounds.agents[n].policy, held[n]) for n in message.agents if n in held]
        again = [send for version in loading for send in self._load(version)]
        return [*((self.host, each) for each in effects), *again, *self._retired()]

    def _check_versions(self, message: Arrivals) -> None:
        moving = {asked.agent: op for op, (asked, _) in self.pending.items() if _moves(asked)}
        bounds.check(message, self.rounds, self.updates, self.versions, moving)

    def account(self, episode: EpisodeId, ended: Ended, now: float) -> Sends:
        """An episode has ended. One that was accounted for before changes nothing; the end of its phase is told again."""
        if episode not in self.rounds.unaccounted:
            return self._moved(self.rounds, rnd.accounted(self.rounds, episode), now)
        dealt = self.dealing.account(episode)
        return dealt + self._moved(*rnd.account(self.rounds, episode, ended, now), now)

    def leave_out(self, now: float) -> Sends:
        """The present barrier opens without whoever is missing, and the updates of those are fenced. Where updates overlap rollouts, an
        agent that is missing is busy with an update of an earlier round, which goes on."""
        out = {AgentName(name) for name in self.rounds.barrier.missing} if not self.updates.overlap else set()
        self.fenced |= out.intersection(self.rounds.order.admitted)
        sends = self.dealing.drop() if not self.rounds.of_agents else []
        sends += self._moved(*rnd.leave_out(self.rounds, now), now)
        for op, (asked, _) in tuple(self.pending.items()):
            if asked.agent in out and _moves(asked):
                reason = f"{asked.agent} was left out: its update had not ended by the deadline; its version stays what it is"
                sends += self._outcome(op, OperationFailed(self.spec.run, op, reason))
        return sends

    def admits(self, episode: EpisodeId, policy: PolicyVersion) -> str:
        """Why this episode may not ask for an answer of this version ("": it may). Invariant I1."""
        if episode not in self.rounds.unaccounted:
            return f"episode {episode} is not being played"
        if policy == BASE:
            return ""
        agent = self.rounds.players.get(policy.policy)
        if agent is None:
            return f"run {self.spec.run} has no policy {policy.policy!r}"
        bound = self.rounds.versions.get(agent, 0)
        return "" if bound == policy.version else f"{policy} was asked for, this round plays {policy.policy}@{bound}"

    # --- further hosts ---

    def enlist(self, peer: PeerName, message: Enlist) -> Sends:
        """It plays from now on. ValueError if its scenario is another one. Said again, it is answered again."""
        if message.capacity < 1:
            raise ValueError(f"{peer} would play {message.capacity} episodes at once; it must be at least 1")
        if peer == self.host:
            raise ValueError(f"{peer} is the learner host of run {self.spec.run!r}; it plays already")
        if message.scenario != self.spec.scenario:
            raise ValueError(f"run {self.spec.run!r} plays {self.spec.scenario!r}, {peer} has {message.scenario!r}")
        other = deals.disagreement(self.spec.terms, message.terms)
        if other:
            raise ValueError(
                f"{peer} has another {self.spec.scenario!r} than run {self.spec.run!r}: its {other}; start it with the run's"
            )
        told = self.admitted
        enlisted = Enlisted(
            self.spec.run, self.host, self.spec.setup, told.model, told.tokenizer, told.data, told.machine
        )
        return [(peer, enlisted), *self.dealing.join(peer, message.capacity)]

    def played(self, peer: PeerName, message: Played) -> Sends | None:
        """A further host has played some. None: the deal is not its own (any more), which it is told by whoever counts that."""
        return self.dealing.played(peer, message.deal, message.episodes, message.bundle)

    def not_yours(self, peer: PeerName, message: Played) -> Sends:
        return [(peer, Settled(self.spec.run, (message.deal,)))]

    def farewell(self, reason: str, finished: bool) -> Sends:
        """What further hosts hear when the run is over."""
        return [(host, RunStopped(self.spec.run, reason, finished)) for host in self.dealing.further()]

    def may_play(self, peer: PeerName, turn: TurnId) -> str:
        """Why this host may not open this turn ("": it may, or the gate has more to say)."""
        if peer not in self.dealing.hosts:
            return f"{peer} plays nothing of run {self.spec.run!r}"
        if turn.episode in self.dealing.where and self.dealing.holder(turn.episode) != (peer, turn.attempt):
            return f"episode {turn.episode} is not {peer}'s to play (any more)"
        return ""

    def operate(self, message: Operate) -> Sends:
        """Send the operation to its worker (a repeated one too: it does it once), answer it from the store, or refuse it."""
        if message.op in self.outcomes:
            return [(self.host, self.outcomes[message.op])]
        if message.op in self.pending:
            return self._work(message.op)
        refusal = self._refusal(message)
        if refusal:
            return self._outcome(message.op, OperationFailed(self.spec.run, message.op, refusal))
        worker = self.scorer if isinstance(message.operation, Score) else self.updater
        if worker is None and isinstance(message.operation, Score):
            return self._outcome(
                message.op, OperationFailed(self.spec.run, message.op, "no forward worker serves this run")
            )
        self.pending[message.op] = (message, worker or NOBODY)
        return self._work(message.op)

    def _work(self, op: OpId) -> Sends:
        message, worker = self.pending[op]
        work = Work(self.spec.run, op, worker, message.policy, message.operation)
        return [(self.owners[worker], work)] if worker in self.owners else []

    def done(self, message: WorkerDone) -> Sends:
        """A worker has finished an operation. A published version is loaded by every rollout worker before it counts as ready."""
        if message.op not in self.pending or self.pending[message.op][1] != message.worker:
            return []
        wrong = _mismatch(self.pending[message.op][0], message.result)
        if wrong:
            return self._outcome(message.op, OperationFailed(self.spec.run, message.op, f"{message.worker} {wrong}"))
        sends: Sends = []
        asked = self.pending[message.op][0]
        if isinstance(asked.operation, Rewind):
            self.fenced -= {asked.agent}
        if isinstance(message.result, Published):
            version, adapter = message.result.version, message.result.adapter
            try:
                self.versions = ver.publish(self.versions, version, adapter)
            except ValueError as error:
                return self._outcome(message.op, OperationFailed(self.spec.run, message.op, str(error)))
            for worker in sorted(self.versions.workers):
                sends.append((self.owners[worker], Load(self.spec.run, worker, version, adapter)))
        return sends + self._outcome(message.op, OperationDone(self.spec.run, message.op, message.result))

    def failed(self, message: WorkerFailed) -> Sends:
        if message.op not in self.pending or self.pending[message.op][1] != message.worker:
            return []
        return self._outcome(message.op, OperationFailed(self.spec.run, message.op, message.reason, message.lost))

    def loaded(self, message: Loaded, now: float) -> Sends:
        """A rollout worker serves a version. ValueError if it was never published, WrongWeights if its digest is another."""
        self.versions = ver.acknowledge(self.versions, message.version, message.worker, message.digest)
        return self.settle(now)

    def settle(self, now: float) -> Sends:
        self.updates, ended = upd.settle(self.updates, self.versions.loaded)
        moved = self._moved(*rnd.settle(self.rounds, self.versions.loaded, now), now)
        return [*((self.host, each) for each in ended), *moved, *(self._retired() if ended else [])]

    def lose(self, worker: WorkerName, now: float) -> Sends:
        """A worker is out of service (call `staff` afterwards). What it was asked to do is nowhere; a rollout worker is waited for no
        longer."""
        self.versions = ver.leave(self.versions, worker)
        for op, (asked, holder) in self.pending.items():
            if holder == worker:
                self.pending[op] = (asked, NOBODY)
                self.given.pop(op, None)
        self.scorer = None if self.scorer == worker else self.scorer
        self.updater = None if self.updater == worker else self.updater
        self.owners.pop(worker, None)
        return self.settle(now)

    def staff(self, update: Found, forward: Found) -> Sends:
        """Fill the places of workers that are gone with these, if any, and give them what is nowhere. Scores that nobody can do fail."""
        if self.updater is None and update is not None:
            self.updater = update[0]
            self.owners[update[0]] = update[1]
        if self.scorer is None and forward is not None:
            self.scorer = forward[0]
            self.owners[forward[0]] = forward[1]
        sends: Sends = []
        for op, (asked, holder) in tuple(self.pending.items()):
            worker = self.scorer if isinstance(asked.operation, Score) else self.updater
            if holder == NOBODY and worker is not None:
                self.pending[op] = (asked, worker)
                sends += self._work(op)
            elif holder == NOBODY and isinstance(asked.operation, Score):
                sends += self._outcome(op, OperationFailed(self.spec.run, op, "its forward worker was lost"))
        return sends

    def overdue(self, now: float) -> dict[WorkerName, Operate]:
        """Workers that have not done an operation by its deadline, with the first such operation of each."""
        found: dict[WorkerName, Operate] = {}
        for op, (asked, worker) in self.pending.items() if self.spec.operation_deadline else ():
            if worker in self.owners and now - self.given.setdefault(op, now) >= self.spec.operation_deadline:
                found.setdefault(worker, asked)
        return found

    def join(self, worker: WorkerName, owner: PeerName, holding: Iterable[Held] = ()) -> Sends:
        """A rollout worker enters service, or is back: it must load whatever is in use and it does not hold."""
        self.owners[worker] = owner
        self.versions, wanted = ver.join(self.versions, worker)
        held = {each.version: each.digest for each in holding if (each.run, each.worker) == (self.spec.run, worker)}
        sends: Sends = []
        for version in wanted:
            adapter = self.versions.adapters[version]
            if held.get(version) == adapter.digest:
                self.versions = ver.acknowledge(self.versions, version, worker, adapter.digest)
            else:
                sends.append((owner, Load(self.spec.run, worker, version, adapter)))
        return sends

    def ask_again(self, owner: PeerName) -> Sends:
        """This task server is back: it may have missed what it was asked to do, or its answers were missed."""
        ours = [op for op, (_, worker) in self.pending.items() if self.owners.get(worker) == owner]
        return [send for op in ours for send in self._work(op)]

    def restart(self, now: float) -> None:
        """The coordinator restarted: rounds, versions and operations are what they were, and nobody serves before it says so."""
        self.rounds = rnd.restart(self.rounds, now)
        self.versions = ver.restart(self.versions)
        for host in self.dealing.hosts:
            self.dealing.reach(host, False)
        self.noticed = self.since = now
        self.given = {}
        self.lacking = None if self.lacking is None else now

    def _load(self, version: PolicyVersion) -> Sends:
        """Ask the workers that do not serve it yet once more."""
        adapter = self.versions.adapters.get(version)
        late = self.versions.workers - self.versions.away - self.versions.serving(version) if adapter else ()
        return [(self.owners[w], Load(self.spec.run, w, version, adapter)) for w in sorted(late) if adapter]

    def servers(self) -> tuple[PeerName, ...]:
        return tuple(dict.fromkeys(self.owners.values()))

    def _refusal(self, message: Operate) -> str:
        agent = self.rounds.agents.get(message.agent)
        if agent is None or agent.policy != message.policy:
            return f"agent {message.agent!r} does not own policy {message.policy!r}"
        if isinstance(message.operation, Score):
            return ""
        if isinstance(message.operation, SaveState):
            return "" if message.policy in self.versions.current else f"policy {message.policy!r} is not attached yet"
        if isinstance(message.operation, Attach | LoadState):
            attaching = (asked for asked, _ in self.pending.values() if isinstance(asked.operation, Attach | LoadState))
            known = message.policy in self.versions.current or any(a.policy == message.policy for a in attaching)
            return f"policy {message.policy!r} is attached already" if known else ""
        if agent.name in self.rounds.dropped and not self.updates.overlap:
            return f"{agent.name} was left out of round {self.rounds.round}: its version stays what it is until the next round"
        if agent.name not in self._updating():
            return f"{agent.name} may not update now: the run is at {self.rounds.phase} of round {self.rounds.round}"
        return self._not_rewound(message, agent.name)

    def _updating(self) -> frozenset[AgentName]:
        """Whose weights may move now."""
        rounds = self.rounds
        if self.updates.overlap:
            return self.updates.updating
        if (rounds.phase, rounds.edge) != (Phase.UPDATE, Edge.END):
            return frozenset()
        return frozenset(rounds.order.admitted) - rounds.order.done - rounds.held.keys() - rounds.dropped

    def _not_rewound(self, message: Operate, agent: AgentName) -> str:
        """Why the weights must first be those of the published version, or may not be made others ("": all is well)."""
        current = PolicyVersion(message.policy, self.versions.current.get(message.policy, 0))
        adapter, operation = self.versions.adapters.get(current), message.operation
        if isinstance(operation, Rewind):
            right = adapter is not None and adapter.digest == operation.adapter.digest
            return "" if right else f"{agent} may only be rewound to {current}, which is published"
        return f"{agent} was left out of an update: rewind it to {current} first" if agent in self.fenced else ""

    def _outcome(self, op: OpId, outcome: OperationDone | OperationFailed) -> Sends:
        self.pending.pop(op, None)
        self.given.pop(op, None)
        self.outcomes[op] = outcome
        while len(self.outcomes) > STORED:
            del self.outcomes[next(iter(self.outcomes))]
        return [(self.host, outcome)]

    def _moved(self, after: Rounds, effects: Iterable[Effect], now: float) -> Sends:
        before, self.rounds = self.rounds, after
        if after.at != before.at:
            self.noticed = self.since = now
        sends: Sends = []
        for effect in effects:
            if isinstance(effect, Begin):
                sends += self._discarded(effect.groups[0][0]) + self.dealing.begin(effect.groups, self._bound())
            else:
                sends.append((self.host, effect))
        onward = self.updates.overlap and (after.at != before.at or after.finished != before.finished)
        if onward and (before.phase, before.edge) == (Phase.ROLLOUT, Edge.END):
            members = [name for name in before.agents if name not in before.dropped]
            self.updates = upd.open_gate(self.updates, before.round, members)
        if onward or before.phase == Phase.UPDATE != after.phase:
            sends += self._retired()
        return sends

    def _bound(self) -> tuple[PolicyVersion, ...]:
        """What each policy plays with in this phase."""
        rounds = self.rounds
        return tuple(map(maker(PolicyVersion), rounds.players, map(rounds.versions.get, rounds.agents, repeat(0))))

    def _discarded(self, first: EpisodeId) -> Sends:
        """This episode's phase begins: what further hosts left on the data plane in the one before is in the learner host's hands."""
        dealing, server = self.dealing, self.owners.get(self.updater or NOBODY)
        if not dealing.bundles or server is None or (first.round, first.phase) == (dealing.round, dealing.phase):
            return []
        return [(server, Discard(self.spec.run, dealing.round, dealing.phase))]

    def _retired(self) -> Sends:
        if len(self.versions.served) <= len(self.versions.current):
            return []  # there is one version of each policy
        self.versions, old = ver.retire(self.versions, bounds.oldest(self.rounds, self.updates, self.versions))
        workers = sorted(self.versions.workers)
        return [(self.owners[w], Unload(self.spec.run, w, version)) for version in old for w in workers]

    def violations(self) -> list[str]:
        found = rnd.violations(self.rounds, self.versions.loaded) + ver.violations(self.versions)
        found += upd.violations(self.updates, self.versions.loaded)
        found += bounds.violations(self.rounds, self.updates, self.versions)
        scores = [isinstance(asked.operation, Score) for asked, worker in self.pending.values() if worker == NOBODY]
        if scores and (self.updater is not None or any(scores)):
            found.append("P4")
        if set(self.pending) & set(self.outcomes):
            found.append("P1")
        moving = {asked.agent for asked, _ in self.pending.values() if _moves(asked)}
        if moving - self._updating():
            found.append("P2")
        if self.dealing.where.keys() != self.rounds.unaccounted:
            found.append("P0")
        return found + self.dealing.violations()


def _moves(asked: Operate) -> bool:
    """Whether the operation moves weights (or publishes them): then it needs the update gate."""
    return not isinstance(asked.operation, Attach | LoadState | SaveState | Score)


def _mismatch(asked: Operate, result: Result) -> str:
    """What is wrong with this result as an answer to the operation ("": nothing)."""
    operation = asked.operation
    if isinstance(operation, Attach | LoadState | Publish):
        number = 0 if isinstance(operation, Attach) else operation.version
        wanted = PolicyVersion(asked.policy, number)
        if not isinstance(result, Published) or result.version != wanted:
            return f"answered {result}, expected was {wanted} published"
        return ""
    right = {Score: Scored, SaveState: Saved}.get(type(operation), Measured)
    return "" if isinstance(result, right) else f"answered {result}, expected was {right.__name__}"
