"""An honest learner host as a state machine: it arrives, plays, learns, and checks everything the coordinator tells it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core_values import arrival, blob, request

from coordinator.core.rounds import phases
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, ForwardBackward, OptimStep, Publish, Published, Rewind, Score
from tinker.protocol.to_coordinator import AgentSpec, RunSpec, Straggler
from tinker.protocol.to_host import (
    Admitted,
    Delivered,
    MayUpdate,
    Opened,
    OperationDone,
    OperationFailed,
    Play,
    RunStopped,
    TurnClosed,
    TurnRefused,
)
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import (
    BASE,
    AdamSpec,
    Edge,
    Ended,
    EpisodeId,
    LoraSpec,
    LossSpec,
    OpId,
    Phase,
    PolicyVersion,
    TurnId,
    unpack_ids,
)

if TYPE_CHECKING:
    from core_world import World

At = tuple[int, Phase, Edge]


def schedule(spec: RunSpec) -> list[At]:
    """Every barrier of the run, in order, written down independently of the core."""
    evaluates = spec.evaluate_every > 0 and spec.evaluations > 0
    lags = any(each.max_lag > 0 for each in spec.agents)  # then updates have no barriers
    parts = [(0, Phase.EVALUATE)] if evaluates else []
    for round in range(1, spec.rounds + 1):
        parts += [(round, Phase.ROLLOUT), *([] if lags else [(round, Phase.UPDATE)])]
        if evaluates and (round % spec.evaluate_every == 0 or round == spec.rounds):
            parts.append((round, Phase.EVALUATE))
    return [(round, phase, edge) for round, phase in parts for edge in (Edge.START, Edge.END)]


@dataclass(frozen=True)
class Slowly:
    """A message that its sender is slow to send."""

    message: object


@dataclass
class Host:
    """`turns`: the open turn of each running episode. `plan`: operations an admitted agent has still to do. `numbers`: the last version an
    agent asked to publish. `bound`: what each policy plays with now. `left_out`: of this round; `fenced`: of any round so far."""

    spec: RunSpec
    rng: random.Random
    opened: list[Opened] = field(default_factory=list)
    version: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    fenced: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    samples: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    plan: dict[str, list[str]] = field(default_factory=dict)
    asking: dict[str, OpId] = field(default_factory=dict)
    asked: dict[OpId, str] = field(default_factory=dict)
    outcomes: dict[OpId, object] = field(default_factory=dict)
    turns: dict[EpisodeId, said.OpenTurn] = field(default_factory=dict)
    closed: dict[TurnId, TurnClosed] = field(default_factory=dict)
    playing: dict[EpisodeId, int] = field(default_factory=dict)
    played: list[EpisodeId] = field(default_factory=list)
    attempts: dict[EpisodeId, int] = field(default_factory=dict)
    accounted: list[EpisodeId] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    began: bool = False
    stopped: str = ""
    lost: bool = False

    def __post_init__(self) -> None:
        self.version = {each.name: 0 for each in self.spec.agents}
        self.numbers = dict(self.version)
        self.name = self.spec.run.removeprefix("run of ")

    @property
    def over(self) -> bool:
        return self.lost or bool(self.stopped) or len(self.opened) == len(schedule(self.spec))

    @property
    def progress(self) -> int:
        """Grows whenever anything of its run comes to its end."""
        return len(self.opened) + len(self.outcomes) + len(self.accounted) + len(self.closed)

    def story(self) -> object:
        return self.spec, self.opened[-1:], list(self.turns), self.plan

    def hear(self, message: object, world: World) -> list[object]:
        if isinstance(message, RunStopped):
            self.stopped = message.reason
        if self.stopped:
            return []
        match message:
            case Admitted() if not self.began:
                self.began = True
                self.plan = {each.name: ["attach", *self.rng.choice(([], ["score"]))] for each in self.spec.agents}
                return [send for each in self.spec.agents for send in self.next_operation(each)]
            case Opened():
                return self.passed(message)
            case Play():
                return self.play(message)
            case Delivered():
                return self.delivered(message)
            case TurnClosed():
                return self.turn_closed(message)
            case TurnRefused():
                current = self.turns.get(message.turn.episode)
                forged = message.turn.number == 99 or "policy of nobody" in message.reason
                assert current is None or current.turn != message.turn or forged, (
                    f"an honest turn was refused: {message.reason}"
                )
            case MayUpdate():
                return self.update(message)
            case OperationDone() | OperationFailed() if message.op in self.asked:
                return self.outcome(message)
        return []

    # --- barriers ---

    def passed(self, opened: Opened) -> list[object]:
        at = (opened.round, opened.phase, opened.edge)
        seen = [each for each in self.opened if (each.round, each.phase, each.edge) == at]
        if seen:
            assert seen == [opened], "a barrier opens once, and its opening is always told the same"
            return []
        assert at == schedule(self.spec)[len(self.opened)], f"{at} opened out of turn"
        if opened.phase == phases(self.spec, opened.round)[0] and opened.edge == Edge.START:
            self.left_out = set()
        self.leave_out(opened)
        self.bound = dict(zip(opened.policies, opened.numbers, strict=True))
        for each in self.spec.agents:
            number = self.bound[each.policy]
            assert number == self.version[each.name] or (
                each.name in self.left_out and number < self.version[each.name]
            )
        self.opened.append(opened)
        if opened.edge == Edge.END:
            assert not self.playing, "a phase ended while episodes were played (I2)"
            after = schedule(self.spec)[len(self.opened) :]
            return self.arrive_all(after[0]) if after else [said.EndRun(self.spec.run, "finished")]
        if opened.phase == Phase.UPDATE:
            self.admitted = []
            idle = [each for each in self.spec.agents if not self.due(each)]
            return self.arrive_some(idle, (opened.round, Phase.UPDATE, Edge.END))
        return []

    def leave_out(self, opened: Opened) -> None:
        """Only what the rule of this barrier allows, and never who is there; of who is left out nothing goes on."""
        agents = opened.edge == Edge.START or opened.phase == Phase.UPDATE
        everybody = {each.name for each in self.spec.agents} - self.left_out
        if agents:
            assert sorted(opened.members + opened.dropped) == sorted(everybody)
        if not opened.dropped:
            return
        (rule,) = [each for each in self.spec.barriers if (each.phase, each.edge) == (opened.phase, opened.edge)]
        assert rule.straggler == Straggler.DROP and rule.deadline
        if agents:
            assert len(opened.members) >= rule.quorum
            self.left_out |= set(opened.dropped)
            self.fenced |= self.left_out
            for name in opened.dropped:
                if name in self.admitted and (opened.phase, opened.edge) == (Phase.UPDATE, Edge.END):
                    self.unsettled.add(name)
                self.plan[name] = []
                self.asking.pop(name, None)
            return
        self.dropped += opened.dropped
        for episode in [each for each in self.played if str(each) in opened.dropped]:  # its account may be under way
            self.playing.pop(episode, None)
            self.turns.pop(episode, None)

    def arrive_all(self, at: At) -> list[object]:
        self.samples = {each.name: self.rng.randint(0, 2) for each in self.spec.agents}
        return self.arrive_some(self.rng.sample(self.spec.agents, len(self.spec.agents)), at)

    def arrive_some(self, some: list[AgentSpec], at: At) -> list[object]:
        """Some of them together, the others one by one."""
        together = some[self.rng.randint(0, len(some)) :]
        sends: list[object] = [self.arrive(each, at) for each in some if each not in together]
        if together:
            columns = zip(
                *((each.name, self.version[each.name], self.samples[each.name]) for each in together), strict=True
            )
            digests = tuple(self.digests.get(each.name, "") for each in together)
            sends.append(said.Arrivals(self.spec.run, *at, *map(tuple, columns), digests))  # type: ignore[arg-type]
        if self.spec.barriers and len(sends) > 1 and self.rng.random() < 0.6:
            sends[0] = Slowly(sends[0])
        return sends

    def arrive(self, each: AgentSpec, at: At) -> said.Arrive:
        return arrival(each.name, *at, self.version[each.name], self.samples.get(each.name, 0), run=self.spec.run)

    def due(self, each: AgentSpec) -> bool:
        return (
            each.name not in self.left_out
            and each.every > 0
            and self.opened[-1].round % each.every == 0
            and self.samples[each.name] > 0
        )

    # --- updates ---

    def update(self, gate: MayUpdate) -> list[object]:
        each = next(agent for agent in self.spec.agents if agent.name == gate.agent)
        if each.name in self.admitted:  # told again
            return []
        assert gate.round == self.opened[-1].round and self.due(each)
        groups = [list(group) for group in self.spec.update_order]
        named = [name for group in groups for name in group]
        groups.append([other.name for other in self.spec.agents if other.name not in named])
        here = next(k for k, group in enumerate(groups) if each.name in group)
        for other in self.spec.agents:
            if self.due(other) and any(other.name in group for group in groups[:here]):
                assert other.name in self.admitted and not self.plan[other.name], (
                    f"{each.name} was let in before {other.name}"
                )
        self.admitted.append(each.name)
        again = ["rewind"] if each.name in self.unsettled else []
        self.plan[each.name] = [*self.rng.choice(([], ["score"])), *again, "gradient", "step", "publish"]
        first = self.next_operation(each)
        return [Slowly(one) for one in first] if self.spec.barriers and self.rng.random() < 0.5 else first

    def next_operation(self, each: AgentSpec) -> list[object]:
        if not self.plan[each.name]:
            if self.opened and self.opened[-1].phase == Phase.UPDATE and self.opened[-1].edge == Edge.START:
                return [self.arrive(each, (self.opened[-1].round, Phase.UPDATE, Edge.END))]
            ready = all(not plan for plan in self.plan.values())
            return self.arrive_all(schedule(self.spec)[0]) if ready and not self.opened else []
        what = self.plan[each.name][0]
        op = OpId(f"{what} {each.name} {len(self.asked)}")
        self.asked[op] = each.name
        self.asking[each.name] = op
        self.numbers[each.name] += what == "publish"
        operation = {
            "attach": Attach(LoraSpec()),
            "score": Score(blob("rows"), BASE),
            "gradient": ForwardBackward(blob("rows"), LossSpec("importance_sampling")),
            "step": OptimStep(AdamSpec(1e-3)),
            "rewind": Rewind(blob(self.digests.get(each.name, ""))),
            "publish": Publish(self.numbers[each.name]),
        }[what]
        return [said.Operate(self.spec.run, op, each.name, each.policy, operation)]

    def outcome(self, message: OperationDone | OperationFailed) -> list[object]:
        if message.op in self.outcomes:
            assert self.outcomes[message.op] == message, "an operation has one outcome"
            return []
        self.outcomes[message.op] = message
        each = next(agent for agent in self.spec.agents if agent.name == self.asked[message.op])
        plan = self.plan[each.name]
        if self.asking.get(each.name) != message.op:  # of an update it was left out of meanwhile
            failed = isinstance(message, OperationFailed) or message.op.startswith("score")
            assert failed and each.name in self.fenced, "what is fenced has failed"
            return []
        if isinstance(message, OperationFailed):
            assert "may not update" not in message.reason, message.reason
            assert "left out" not in message.reason and "rewound" not in message.reason, message.reason
            if plan[0] == "score" or (plan[0] != "attach" and self.rng.random() < 0.5):
                self.plan[each.name] = (
                    plan[1:] if plan[0] == "score" else []
                )  # go on without: the agent keeps its version
            return self.next_operation(each)
        if plan[0] == "rewind":
            self.unsettled.discard(each.name)
        if isinstance(message.result, Published):
            self.version[each.name] = message.result.version.version
            self.digests[each.name] = message.result.adapter.digest
        self.plan[each.name] = plan[1:]
        return self.next_operation(each)

    # --- episodes ---

    def play(self, message: Play) -> list[object]:
        if set(message.episodes) <= set(self.played):  # told again
            return []
        assert (message.round, message.phase) == (self.opened[-1].round, self.opened[-1].phase)
        assert not set(message.episodes) & set(self.played), "an episode is given out once"
        self.played += message.episodes
        sends: list[object] = []
        for episode in message.episodes:
            if episode in self.accounted:  # its host had delivered it before it was lost
                continue
            self.attempts[episode] = message.attempt
            self.playing[episode] = self.rng.randint(0, 3)
            sends += self.next_turn(episode, 0)
        return sends

    def next_turn(self, episode: EpisodeId, number: int) -> list[object]:
        left = self.playing[episode]
        self.turns.pop(episode, None)
        if left == 0:
            return self.account(episode)
        self.playing[episode] = left - 1
        seats = self.rng.sample("uvwx", self.rng.randint(1, 3))
        by_agent = {each.policy: self.bound[each.policy] for each in self.spec.agents}
        requests = []
        for seat in seats:
            policy = self.rng.choice(list(by_agent))
            requests.append(request(seat * (1 + "uvwx".index(seat)), PolicyVersion(policy, by_agent[policy])))
            if self.rng.random() < 0.1:
                requests[-1] = request(requests[-1].seat, BASE)
        turn = TurnId(self.spec.run, episode, number, self.attempts[episode])
        opened = said.OpenTurn(turn, tuple(requests), 20.0)
        self.turns[episode] = opened
        sends: list[object] = [opened]
        if self.rng.random() < 0.04:  # the scenario raised while its turn was open
            sends += self.account(episode)
        return sends

    def account(self, episode: EpisodeId) -> list[object]:
        """The first that comes of an episode counts, whoever played it."""
        self.playing.pop(episode, None)
        self.turns.pop(episode, None)
        if episode in self.accounted:
            return []
        self.accounted.append(episode)
        return [said.EpisodeEnded(self.spec.run, episode, self.rng.choice(list(Ended)))]

    def delivered(self, message: Delivered) -> list[object]:
        """What a further host has played."""
        passed = [(each.round, each.phase, each.edge) for each in self.opened]
        if (message.deal.round, message.deal.phase, Edge.END) in passed:  # told again
            assert set(message.episodes) <= {*self.accounted} or self.dropped
            return []
        return [send for episode in message.episodes for send in self.account(episode)]

    def turn_closed(self, message: TurnClosed) -> list[object]:
        first = self.closed.setdefault(message.turn, message)
        assert first == message, "a turn closes once, and its results are always told the same"
        current = self.turns.get(message.turn.episode)
        if current is None or current.turn != message.turn:
            return []
        assert [r.seat for r in message.results] == [r.seat for r in current.requests], (
            "results come in admission order"
        )
        for result, asked in zip(message.results, current.requests, strict=True):
            assert result.version == asked.policy
            if result.forfeit:
                assert not result.ids
            else:
                assert unpack_ids(result.ids) == [message.turn.number, len(asked.seat)], "somebody else's answer"
        return self.next_turn(message.turn.episode, message.turn.number + 1)

    # --- checks ---

    def check_asked(self, asked: Generate) -> None:
        current = self.turns.get(asked.turn.episode)
        if asked.turn.episode in self.playing:
            assert current is not None and current.turn == asked.turn, "only the open turn of a table generates"
            assert (asked.seat, asked.policy) in [(r.seat, r.policy) for r in current.requests], (
                "only admitted seats generate"
            )
            at = self.opened[-1]
            assert asked.policy == BASE or asked.policy in at.versions, "a version outside the bound (I1)"

    def check_end(self) -> None:
        assert self.over
        if self.lost or self.stopped:
            return
        assert [(each.round, each.phase, each.edge) for each in self.opened] == schedule(self.spec)
        assert not self.turns and not self.playing
        assert len(set(self.accounted)) == len(self.accounted), "an episode was accounted for twice (I4)"
        assert all(op in self.outcomes for op, who in self.asked.items() if who not in self.fenced)
        each_round = self.spec.groups * self.spec.group_size
        rollouts = {str(each) for each in self.accounted if each.phase == Phase.ROLLOUT}
        rollouts |= {each for each in self.dropped if f"/{Phase.ROLLOUT}/" in each}
        assert len(rollouts) == each_round * self.spec.rounds
