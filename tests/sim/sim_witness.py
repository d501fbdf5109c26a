"""A witness at the network: hears every frame that is sent or arrives, keeps its own account, and says what may not be.

It knows the protocol and nothing of the code under test. What it checks, by what `design.md` and the simulation's brief promise:
I1 and I9 (tokens of exactly the version asked for, versions rise and never change), I2 (no update before every episode is accounted for),
I3 (admitted seats of the newest turn only), I4 (an agent trains on its own sampled tokens, each once), I6 (barriers open once, in order,
when everybody has come), I7 (one outcome for each operation, effects once), late and repeated answers are repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args
from unittest import mock

from coordinator.app import daemon, journal
from coordinator.core.rounds import phases
from tinker.client import client
from tinker.protocol import ToAny, ToCoordinator, ToHost, ToTaskserver
from tinker.protocol import to_coordinator as said
from tinker.protocol import to_host as told
from tinker.protocol.batches import Row
from tinker.protocol.operations import Attach, LoadState, Publish, Published, Rewind, SaveState, Score
from tinker.protocol.to_any import Welcome
from tinker.protocol.to_taskserver import Generate, Load, Work
from tinker.protocol.values import (
    AgentName,
    Dealt,
    Edge,
    EpisodeId,
    OpId,
    Phase,
    PolicyName,
    PolicyVersion,
    RunId,
    SeatName,
    TurnId,
    WorkerName,
    unpack_ids,
)
from tinker.runtime.codec import decode, encode
from tinker.server import taskserver

ANY = ToCoordinator | ToHost | ToTaskserver | ToAny
At = tuple[int, Phase, Edge]


@dataclass(slots=True)
class RunAccount:
    """What was said about one run so far."""

    spec: said.RunSpec
    host: str
    arrived: dict[tuple[At, AgentName], said.Arrive] = field(default_factory=dict)
    opened: dict[At, told.Opened] = field(default_factory=dict)
    heard: list[At] = field(default_factory=list)
    plays: dict[EpisodeId, told.Play] = field(default_factory=dict)
    deals: dict[Dealt, tuple[str, set[EpisodeId], told.Play]] = field(
        default_factory=dict
    )  # to whom, and what at first
    ended: dict[EpisodeId, said.EpisodeEnded] = field(default_factory=dict)
    turns: dict[TurnId, said.OpenTurn] = field(default_factory=dict)
    newest: dict[tuple[EpisodeId, int], int] = field(default_factory=dict)  # turns of each attempt
    closed: dict[TurnId, told.TurnClosed] = field(default_factory=dict)
    heard_turns: dict[TurnId, told.TurnClosed] = field(
        default_factory=dict
    )  # what counts at the host: what it heard first
    contexts: dict[tuple[EpisodeId, int, SeatName], bytes] = field(
        default_factory=dict
    )  # what each seat heard and said
    left_out: dict[int, set[AgentName]] = field(default_factory=dict)  # agents, by round
    given_up: set[EpisodeId] = field(default_factory=set)
    updating: set[tuple[int, AgentName]] = field(default_factory=set)  # who was told that it may
    fenced: set[AgentName] = field(default_factory=set)  # whose weights may be those of an update that nobody counts
    answers: dict[tuple[TurnId, SeatName, WorkerName], list[said.Generated]] = field(default_factory=dict)
    operations: dict[OpId, said.Operate] = field(default_factory=dict)
    outcomes: dict[OpId, object] = field(default_factory=dict)
    loaded: set[tuple[WorkerName, PolicyVersion]] = field(default_factory=set)
    counted: set[tuple[At, AgentName]] = field(default_factory=set)  # who has come, and was not held
    updates: dict[AgentName, int] = field(default_factory=dict)  # the newest round whose update it was let into
    through: set[tuple[int, AgentName]] = field(default_factory=set)  # updates that ended (only of agents that may lag)

    @property
    def overlap(self) -> bool:
        """Whether updates have a track of their own."""
        return any(each.max_lag > 0 for each in self.spec.agents)

    def schedule(self) -> list[At]:
        """Every barrier, in order."""
        rounds = range(self.spec.rounds + 1)
        parts = [(round, phase) for round in rounds for phase in phases(self.spec, round)]
        return [(round, phase, edge) for round, phase in parts for edge in (Edge.START, Edge.END)]

    def policy(self, agent: AgentName) -> PolicyName:
        return next(each.policy for each in self.spec.agents if each.name == agent)


class Witness:
    """`did`: rare events, by name. `broken`: what may not be, in order (never raised: code under test would catch it)."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.runs: dict[RunId, RunAccount] = {}
        self.accepted: frozenset[int] = frozenset()  # first ids of replies that parse
        self.published: dict[PolicyVersion, str] = {}
        self.newest: dict[PolicyName, int] = {}
        self.did: Counter[str] = Counter()
        self._epoch = 0  # the highest that was said
        self.welcomed: dict[str, int] = {}  # the highest that each process heard
        self._below = 0  # epochs that are over
        self._read: dict[bytes, Any] = {}
        self.effects: Counter[tuple[str, PolicyName, str]] = Counter()

    def read(self, data: bytes) -> Any:
        """The message; each frame is decoded once, however often it is sent, heard and looked at (messages are frozen)."""
        message = self._read.get(data)
        if message is None:
            message = self._read[data] = decode(data, ANY)
        return message

    # --- what is sent ---

    def sent(self, sender: str, receiver: str, data: bytes) -> None:
        message: Any = self.read(data)
        run = self.runs.get(_run_of(message))
        match message:
            case Welcome():
                self._epoch = max(self._epoch, message.epoch)
                if message.epoch <= self._below:
                    self.broken.append(f"C4.4 epoch {message.epoch} is said again by a coordinator that has restarted")
            case said.Submit():
                self.runs.setdefault(message.spec.run, RunAccount(message.spec, sender))
            case _ if run is None:
                return
            case said.Arrive():
                at = (message.round, message.phase, message.edge)
                self._same(run.arrived.setdefault((at, message.agent), message), message, "I6 arrival")
            case said.Arrivals():
                at = (message.round, message.phase, message.edge)
                columns = (message.agents, message.versions, message.samples or (0,) * len(message.agents))
                for agent, version, samples in zip(*columns, strict=True):
                    one = said.Arrive(message.run, *at, agent, version, samples)
                    self._same(run.arrived.setdefault((at, agent), one), one, "I6 arrival")
            case said.OpenTurn():
                self._open_turn(run, message)
            case said.EpisodeEnded():
                if message.episode not in run.plays:
                    self.broken.append(f"I5 {message.episode} ended, but nobody was to play it")
                self._same(run.ended.setdefault(message.episode, message), message, "I2 account of an episode")
            case said.Operate():
                self._same(run.operations.setdefault(message.op, message), message, "I7 operation")
            case said.Generated():
                run.answers.setdefault((message.turn, message.seat, message.worker), []).append(message)
            case said.Loaded():
                self._immutable(message.version, message.digest)
                run.loaded.add((message.worker, message.version))
            case said.WorkerDone() if isinstance(message.result, Published):
                self._published(run, message.result)
            case told.Opened():
                self._opened(run, message)
            case told.Play():
                self._dealt(run, receiver, message)
            case said.Played():
                self._played(run, sender, message)
            case told.MayUpdate():
                self._may_update(run, message)
                run.updates[message.agent] = max(message.round, run.updates.get(message.agent, 0))
            case told.UpdateEnded():
                run.through.add((message.round, message.agent))
                later = (message.round + 1, Phase.ROLLOUT, Edge.START) in run.opened
                self.did["update ended beside a later rollout"] += later
            case Generate():
                self._generate(run, message)
            case Load():
                self._immutable(message.version, message.adapter.digest)
            case Work():
                self._work(run, message)
            case told.TurnClosed():
                self._turn_closed(run, message)
            case told.TurnRefused():
                turn = message.turn
                current = run.newest.get((turn.episode, turn.attempt)) == turn.number
                honest = current and message.turn.episode not in run.ended
                if honest and "is still open" in message.reason:
                    self.broken.append(f"I5 honest {message}")
            case told.OperationDone() | told.OperationFailed():
                asked = run.operations.get(message.op)
                if (
                    asked is not None
                    and isinstance(asked.operation, Rewind)
                    and isinstance(message, told.OperationDone)
                ):
                    run.fenced.discard(asked.agent)
                if message.op in run.outcomes:
                    self.did["outcome of an operation told again"] += 1
                self._same(run.outcomes.setdefault(message.op, message), message, "I7 outcome")

    def restarted(self) -> None:
        """The coordinator died and came again. It has forgotten its turns, so one whose results its host may have missed is opened and
        closed once more, perhaps with other results: at its host the first that it hears count."""
        self._below = self._epoch
        for run in self.runs.values():
            run.closed.clear()

    def _dealt(self, run: RunAccount, host: str, message: told.Play) -> None:
        """A group goes to one host under each attempt, and only what is not accounted for is told again."""
        known = run.deals.setdefault(message.deal, (host, set(message.episodes), message))
        if known[0] != host or not known[1].issuperset(message.episodes) or known[2].versions != message.versions:
            self.broken.append(f"I6 hand-out of a group: said was {known}, now it is {message} to {host}")
        for episode in message.episodes:
            run.plays.setdefault(episode, message)
        if message.attempt:
            self.did["group dealt again after its host was lost"] += 1

    def _played(self, run: RunAccount, host: str, message: said.Played) -> None:
        """A further host delivers what it was dealt."""
        known = run.deals.get(message.deal)
        self.did["episodes delivered by a further host"] += 1
        if known is None or known[0] != host or not known[1].issuperset(message.episodes):
            self.broken.append(f"I5 {host} delivers {message.episodes} of {message.deal}, dealt was {known}")

    def _open_turn(self, run: RunAccount, message: said.OpenTurn) -> None:
        turn = message.turn
        self._same(run.turns.setdefault(turn, message), message, "I7 turn")
        table = turn.episode, turn.attempt
        before = run.newest.get(table, -1)
        if turn.number > before:
            if turn.number != before + 1:
                self.broken.append(f"I3 turn {turn.number} of {turn.episode} follows {before}")
            run.newest[table] = turn.number
            for each in message.requests:
                if not each.prompt.startswith(run.contexts.get((*table, each.seat), b"")):
                    self.broken.append(f"I3 {each.seat} acts in {turn} on another view than it heard and said before")
        elif turn in run.closed:
            self.did["turn asked for again after it closed"] += 1

    def _opened(self, run: RunAccount, message: told.Opened) -> None:
        at = (message.round, message.phase, message.edge)
        if at in run.opened:
            self.did["opening told again"] += 1
            self._same(run.opened[at], message, "I6 opening")
            return
        schedule = run.schedule()
        place = schedule.index(at)
        if place != len(run.opened):
            self.broken.append(f"I6 {at} opened as number {len(run.opened)} of {schedule}")
        run.opened[at] = message
        self._dropped(run, message)
        if message.edge == Edge.END and message.phase != Phase.UPDATE:
            gone = run.ended.keys() | run.given_up
            open_ = [each for each in run.plays if (each.round, each.phase) == at[:2] and each not in gone]
            if open_:
                self.broken.append(f"I2 {at} opened, but {open_} are not accounted for")
            return
        out = run.left_out.get(message.round, set())
        if set(message.members) & out:
            self.broken.append(f"R5 {at} opened with {message.members}, of whom {out} were left out of the round")
        for agent, version in zip(run.spec.agents, message.versions, strict=True):
            if agent.name in out:
                continue
            newest = at[0] - 1 - agent.max_lag if at[1] == Phase.ROLLOUT else at[0]
            late = [round for round in range(1, newest + 1) if (round, agent.name) not in run.through]
            if run.overlap and late:
                self.broken.append(f"I1 {at} opened, but {agent.name} has not ended its updates of {late}")
            arrival = run.arrived.get((at, agent.name))
            if arrival is None:
                self.broken.append(f"C4.1 {at} opened, but {agent.name} has not come")
                continue
            if version != PolicyVersion(agent.policy, arrival.version):
                self.broken.append(f"I1 {at} opened with {version}, {agent.name} came with {arrival.version}")

    def _dropped(self, run: RunAccount, message: told.Opened) -> None:
        """Only what the rule of the barrier allows is left out, and what is left out counts no more."""
        if not message.dropped:
            return
        at = (message.round, message.phase, message.edge)
        rule = next((each for each in run.spec.barriers if (each.phase, each.edge) == at[1:]), None)
        if rule is None or not rule.deadline or rule.straggler != said.Straggler.DROP:
            self.broken.append(f"R5 {at} opened without {message.dropped}; its rule is {rule}")
            return
        if message.edge == Edge.END and message.phase != Phase.UPDATE:
            self.did["episodes left out"] += 1
            here = {str(each): each for each in run.plays if (each.round, each.phase) == at[:2]}
            run.given_up.update(here[name] for name in message.dropped if name in here)
            return
        self.did["agents left out"] += 1
        out = {AgentName(name) for name in message.dropped}
        run.left_out.setdefault(message.round, set()).update(out)
        if not run.overlap:  # else its update goes on beside the round that it is left out of
            run.fenced |= {agent for agent in out if (message.round, agent) in run.updating}
        if len(message.members) < rule.quorum:
            self.broken.append(f"R5 {at} opened with {message.members}, its quorum is {rule.quorum}")

    def _may_update(self, run: RunAccount, message: told.MayUpdate) -> None:
        spec, at = run.spec, (message.round, Phase.UPDATE, Edge.END)
        run.updating.add((message.round, message.agent))
        if message.agent in run.left_out.get(message.round, ()) and not run.overlap:
            self.broken.append(f"R5 {message.agent} was left out of round {message.round}, and may update")
        for group in spec.update_order:
            if message.agent in group:
                return
            for agent in group:
                start = run.arrived.get(((message.round, Phase.UPDATE, Edge.START), agent))
                every = next(each.every for each in spec.agents if each.name == agent)
                due = start is not None and start.samples > 0 and every > 0 and message.round % every == 0
                due = due or run.overlap
                come = (at, agent) in run.arrived
                if due and not come and agent not in run.left_out.get(message.round, ()):
                    self.broken.append(f"O2 {message.agent} may update before {agent} has arrived")

    def _generate(self, run: RunAccount, message: Generate) -> None:
        asked = run.turns.get(message.turn)
        requests = asked.requests if asked is not None else ()
        request = next((each for each in requests if each.seat == message.seat), None)
        if request is None:
            self.broken.append(f"I3 {message.seat} is not admitted to {message.turn}")
            return
        if request.prompt != message.prompt:
            self.broken.append(f"I3 another prompt for {message.seat} of {message.turn}")
        if request.policy != message.policy:
            self.broken.append(f"I9 {message.policy} instead of {request.policy}")
        if message.turn in run.closed:
            self.broken.append(f"I3 {message.turn} has closed")
        newest = run.newest[message.turn.episode, message.turn.attempt]
        if message.turn.number != newest:
            self.broken.append(f"I3 {message.turn} is older than turn {newest}")
        if (message.worker, message.policy) not in run.loaded:
            self.broken.append(f"I9 {message.worker} never loaded {message.policy}")
        episode = message.turn.episode
        if request.policy.version != self._bound(run, episode, request.policy.policy):
            self.broken.append(f"I1 {request.policy} in {episode}")

    def _bound(self, run: RunAccount, episode: EpisodeId, policy: PolicyName) -> int | None:
        """The version with which this policy's agent arrived at the phase of the episode."""
        opened = run.opened.get((episode.round, episode.phase, Edge.START))
        versions = (
            opened.versions if opened is not None else run.plays[episode].versions
        )  # nobody heard of the opening yet
        found = [each.version for each in versions if each.policy == policy]
        return found[0] if found else None

    def _work(self, run: RunAccount, message: Work) -> None:
        asked = run.operations.get(message.op)
        if asked is None:
            self.broken.append(f"I7 nobody asked for {message.op}")
            return
        if asked.operation != message.operation:
            self.broken.append(f"I7 {message.op} is another operation")
        if isinstance(message.operation, Attach | LoadState | SaveState | Score):
            return
        if (run.updates.get(asked.agent), asked.agent) in run.through:
            self.broken.append(f"O1 {message.op} after the update of {asked.agent} had ended")
        round = self._updating(run, asked.agent)
        if round <= 0:
            self.broken.append(f"I2 {message.op} before any update began")
        wanted = run.spec.groups * run.spec.group_size
        done = sum((each.round, each.phase) == (round, Phase.ROLLOUT) for each in run.ended.keys() | run.given_up)
        if done != wanted:
            self.broken.append(f"I2 {message.op} in round {round}: {done} of {wanted} episodes are accounted for")
        over = (round, Phase.UPDATE, Edge.END) in run.opened
        if over:
            self.broken.append(f"O1 {message.op} after the update of round {round} was over")
        if asked.agent in run.left_out.get(round, ()) and not run.overlap:
            self.broken.append(
                f"R5 {message.op} moves the weights of {asked.agent}, which was left out of round {round}"
            )
        if isinstance(message.operation, Rewind):
            self.did["weights rewound"] += 1
        elif asked.agent in run.fenced:
            self.broken.append(f"P3 {message.op} moves weights of {asked.agent} before they were rewound")

    def _turn_closed(self, run: RunAccount, message: told.TurnClosed) -> None:
        if message.turn in run.closed:
            self.did["closed turn told again"] += 1
            self._same(run.closed[message.turn], message, "C4.2 results of a turn")
            return
        run.closed[message.turn] = message
        requests = run.turns[message.turn].requests
        if [each.seat for each in requests] != [each.seat for each in message.results]:
            self.broken.append(f"I3 {message.turn} closed with other seats, or in another order")
        for request, result in zip(requests, message.results, strict=True):
            if result.version != request.policy:
                self.broken.append(f"I1 {result.seat}: {result.version}, not {request.policy}")
            if result.forfeit:
                self.did["seat forfeited by the gate"] += 1
                continue
            said_ = run.answers.get((message.turn, result.seat, result.worker), [])
            same = [each for each in said_ if (each.ids, each.version) == (result.ids, result.version)]
            if not bool(same):
                self.broken.append(f"I9 {result.worker} never said that for {result.seat} in {message.turn}")

    # --- what arrives ---

    def arrived(self, sender: str, receiver: str, data: bytes) -> None:
        message = self.read(data)
        match message:
            case Welcome():
                self.welcomed[receiver] = max(message.epoch, self.welcomed.get(receiver, 0))
            case told.Opened() if message.run in self.runs:
                heard = self.runs[message.run].heard
                at = (message.round, message.phase, message.edge)
                if at not in heard:
                    heard.append(at)
            case told.TurnClosed() if message.turn.run in self.runs:
                self._heard_turn(self.runs[message.turn.run], message)

    def _heard_turn(self, run: RunAccount, message: told.TurnClosed) -> None:
        if message.turn in run.heard_turns:
            if message != run.heard_turns[message.turn]:
                self.did["turn closed once more with other results"] += 1
            return
        run.heard_turns[message.turn] = message
        prompts = {each.seat: each.prompt for each in run.turns[message.turn].requests}
        for result in message.results:
            if not result.forfeit:
                run.contexts[message.turn.episode, message.turn.attempt, result.seat] = (
                    prompts[result.seat] + result.ids
                )

    def check_end(self) -> None:
        """C4.3: what each host heard are the openings in order, none skipped."""
        for run in self.runs.values():
            heard = run.heard
            if heard != run.schedule()[: len(heard)]:
                self.broken.append(f"C4.3 {run.host} heard {heard}")

    # --- what engines do ---

    def trained(self, policy: PolicyName, rows: Sequence[Row]) -> None:
        """I4: every stretch of trained tokens is an answer of this policy in the newest round, each once; of an episode that was played
        more than once, because its host was lost, one playing at most."""
        run = next(run for run in self.runs.values() if any(each.policy == policy for each in run.spec.agents))
        agent = next(each for each in run.spec.agents if each.policy == policy)
        round = self._updating(run, agent.name)
        said_: set[tuple[EpisodeId, int, SeatName, tuple[int, ...]]] = set()
        for closed in run.heard_turns.values():
            episode, number = closed.turn.episode, closed.turn.number
            if (episode.round, episode.phase) == (round, Phase.ROLLOUT) and episode not in run.given_up:
                young = [each for each in closed.results if self._lag(each.version) <= agent.max_lag]
                mine = [each for each in young if each.version.policy == policy]
                said_ |= {(episode, number, each.seat, tuple(unpack_ids(each.ids))) for each in mine}
        answers = Counter(ids for *_, ids in said_)
        if len(rows) > len({(episode, seat) for episode, _, seat, _ in said_}):
            self.broken.append(f"I4 {policy} trains on {len(rows)} rows of fewer contexts: an episode counts twice")
        for row in rows:
            for stretch in _stretches(row):
                if stretch[0] not in self.accepted:
                    self.broken.append(f"I4 {policy} trains on {stretch}, which did not parse")
                answers[stretch] -= 1
                if answers[stretch] < 0:
                    self.broken.append(f"I4 {policy} trains on {stretch}, which it did not say (so often)")

    def _lag(self, version: PolicyVersion) -> int:
        """How many versions are newer."""
        return self.newest.get(version.policy, 0) - version.version

    def _updating(self, run: RunAccount, agent: AgentName) -> int:
        """The round whose update this agent is in (0: none)."""
        if run.overlap:
            return run.updates.get(agent, 0)
        return max((at[0] for at in run.opened if at[1:] == (Phase.UPDATE, Edge.START)), default=0)

    def effect(self, server: str, policy: PolicyName, what: str) -> None:
        """I7: an engine did something; no oftener than it was asked."""
        self.effects[server, policy, what] += 1
        run = next(run for run in self.runs.values() if any(each.policy == policy for each in run.spec.agents))
        asked = sum(each.policy == policy and type(each.operation).__name__ == what for each in run.operations.values())
        done = self.effects[server, policy, what]
        if done > asked:
            self.broken.append(f"I7 {server} did {what} of {policy} {done} times, asked {asked} times")

    # --- inside ---

    def _published(self, run: RunAccount, result: Published) -> None:
        version = result.version
        told_before = version in self.published
        self._immutable(version, result.adapter.digest)
        newest = self.newest.get(version.policy, -1)
        if told_before and version.version <= newest:
            return
        self.newest[version.policy] = version.version
        asked = {
            each.operation.version
            for each in run.operations.values()
            if each.policy == version.policy and isinstance(each.operation, Publish)
        }
        between = set(
            range(newest + 1, version.version)
        )  # asked for in updates that failed or did not count, and not used again
        if version.version <= newest or not asked >= between:
            self.broken.append(f"I9 {version} was published after {newest}")

    def _immutable(self, version: PolicyVersion, digest: str) -> None:
        known = self.published.setdefault(version, digest)
        if known != digest:
            self.broken.append(f"I9 {version} changed from {known[:12]} to {digest[:12]}")

    def _same(self, known: object, message: object, what: str) -> None:
        if known is not message and known != message:
            self.broken.append(f"{what}: said was {known}, now it is {message}")


@contextmanager
def read_once(witness: Witness) -> Iterator[None]:
    """While it is entered, nobody decodes a frame again that the witness has decoded, or encodes a message again that was just encoded:
    half of what a history costs. What one kind of peer may not hear, it still does not."""
    written: dict[int, tuple[object, bytes]] = {}

    def read(data: bytes, expected: Any) -> Any:
        message = witness.read(data)
        return message if type(message) in get_args(expected) else decode(data, expected)

    def write(message: Any) -> bytes:
        known = written.get(id(message))
        if known is None or known[0] is not message:
            if len(written) > 500:
                written.clear()
            known = written[id(message)] = message, encode(message)
        return known[1]

    with (
        mock.patch.object(daemon, "decode", read),
        mock.patch.object(client, "decode", read),
        mock.patch.object(taskserver, "decode", read),
        mock.patch.object(daemon, "encode", write),
        mock.patch.object(journal, "encode", write),
    ):
        yield


def _run_of(message: Any) -> RunId:
    turn = getattr(message, "turn", None)
    return RunId(turn.run if isinstance(turn, TurnId) else getattr(message, "run", ""))


def _stretches(row: Row) -> list[tuple[int, ...]]:
    """The runs of trained tokens, each as its ids."""
    found: list[list[int]] = []
    inside = False
    for token, trained in zip(row.ids.tolist(), row.mask.tolist(), strict=True):
        if trained and not inside:
            found.append([])
        if trained:
            found[-1].append(token)
        inside = trained
    return [tuple(each) for each in found]
