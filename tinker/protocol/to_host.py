"""Messages a host receives."""

from __future__ import annotations

from dataclasses import dataclass

from tinker.protocol.operations import Lost, Result
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Dealt,
    Edge,
    EpisodeId,
    Finish,
    ModelCard,
    OpId,
    PackedFloats,
    PackedIds,
    PeerName,
    Phase,
    PolicyName,
    PolicyVersion,
    RunId,
    SeatName,
    TurnId,
    WorkerName,
)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The run may begin. The tokenizer bundle and the data endpoint are those of the task server that will serve it."""

    run: RunId
    model: ModelCard
    tokenizer: bytes
    data: str
    machine: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The run waits; `reason` says for what."""

    run: RunId
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """How long one member waited at a barrier (seconds), and for whom it waited last ("" if it was itself the last)."""

    member: str
    seconds: float
    last: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A global barrier opened. In columns: `members[k]` (in order of arrival) waited `waited[k]` seconds; `policies[k]`, in the order of
    the run's agents, plays with `numbers[k]`. `dropped`: who was missing at the deadline: agents are left out until the round ends, of
    episodes (`str(EpisodeId)`) nothing counts."""

    run: RunId
    round: int
    phase: Phase
    edge: Edge
    members: tuple[str, ...]
    waited: tuple[float, ...]
    policies: tuple[PolicyName, ...]
    numbers: tuple[int, ...]
    dropped: tuple[str, ...] = ()

    @property
    def waits(self) -> tuple[Wait, ...]:
        """How long each member waited, and for whom (the last to arrive)."""
        last = self.members[-1] if self.members else ""
        each = zip(self.members, self.waited, strict=True)
        return tuple(Wait(member, seconds, "" if member == last else last) for member, seconds in each)

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """What each agent plays with."""
        return tuple(map(PolicyVersion, self.policies, self.numbers))


@dataclass(frozen=True, slots=True)
class Missing:
    """A barrier is still shut: who has arrived, who is missing (sent at its deadline and every 10 s)."""

    run: RunId
    round: int
    phase: Phase
    edge: Edge
    arrived: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Play:
    """Play these episodes. `group`: they share a start (in evaluation: each has its own). `attempt`: see `Dealt`. `versions`: what each
    policy plays with, for further hosts (the learner host knows it from the opening)."""

    run: RunId
    round: int
    phase: Phase
    group: int
    episodes: tuple[EpisodeId, ...]
    attempt: int = 0
    versions: tuple[PolicyVersion, ...] = ()

    @property
    def deal(self) -> Dealt:
        return Dealt(self.round, self.phase, self.group, self.attempt)


@dataclass(frozen=True, slots=True)
class Enlisted:
    """You are a further host of the run. `setup` is the learner host's (`RunSpec`); the rest is as in `Admitted`."""

    run: RunId
    learner: PeerName
    setup: bytes
    model: ModelCard
    tokenizer: bytes
    data: str
    machine: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A further host has played these episodes; the learner host fetches them from `bundle` and accounts for each."""

    run: RunId
    host: PeerName
    deal: Dealt
    episodes: tuple[EpisodeId, ...]
    bundle: BlobRef


@dataclass(frozen=True, slots=True)
class Settled:
    """These deals are over: accounted for, dropped, or not yours (any more). What you still do for them counts for nothing."""

    run: RunId
    deals: tuple[Dealt, ...]


@dataclass(frozen=True, slots=True)
class MayUpdate:
    """The update gate admits this agent."""

    run: RunId
    round: int
    agent: AgentName


@dataclass(frozen=True, slots=True)
class UpdateEnded:
    """The update of this agent in this round has ended: its version is loaded everywhere (only in runs whose agents may lag)."""

    run: RunId
    round: int
    agent: AgentName


@dataclass(frozen=True, slots=True)
class SeatResult:
    """One admitted seat's part of a closed turn: an answer, or `forfeit` with the reason (then ids and logprobs are empty)."""

    seat: SeatName
    worker: WorkerName
    ids: PackedIds
    logprobs: PackedFloats
    finish: Finish
    version: PolicyVersion
    busy: float = 0.0
    forfeit: str = ""
    engine: float = 0.0  # seconds the engine had been at work in all, when it answered


@dataclass(frozen=True, slots=True)
class TurnClosed:
    """Every admitted seat has acted or forfeited; results are in the order in which the seats were admitted."""

    turn: TurnId
    results: tuple[SeatResult, ...]


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The gate refused the turn; nothing was generated. `fenced`: the episode is another host's to play (now)."""

    turn: TurnId
    reason: str
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class OperationDone:
    run: RunId
    op: OpId
    result: Result


@dataclass(frozen=True, slots=True)
class OperationFailed:
    """`lost`: what its worker lacks to do it."""

    run: RunId
    op: OpId
    reason: str
    lost: Lost = Lost.NOTHING


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run is over; `reason` says who should do what. `finished`: its learner host ended it in good order (told to further hosts)."""

    run: RunId
    reason: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorLoad:
    """What coordination cost so far, in this coordinator process (sent when a rollout or an evaluation ends)."""

    cpu_seconds: float
    turns: int
    messages: int


ToHost = (
    Admitted
    | Queued
    | Opened
    | Missing
    | Play
    | Enlisted
    | Delivered
    | Settled
    | MayUpdate
    | TurnClosed
    | TurnRefused
    | OperationDone
    | OperationFailed
    | RunStopped
    | CoordinatorLoad
    | UpdateEnded
)
