"""Messages the coordinator receives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tinker.protocol.operations import Lost, Operation, Result
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Dealt,
    Edge,
    Ended,
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
    PoolKind,
    Role,
    RunId,
    Sampling,
    SeatName,
    Term,
    TurnId,
    WorkerName,
)

# --- from every peer ---


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """One worker of a pool. `capacity`: requests it serves at once; more wait in its queue."""

    name: WorkerName
    kind: PoolKind
    engine: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Held:
    """A version that a worker serves for a run, and the digest of what it loaded."""

    run: RunId
    worker: WorkerName
    version: PolicyVersion
    digest: str


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of every connection. A task server also says what it offers.

    `incarnation` rises whenever the same process joins anew (the coordinator restarted, or gave it up); a repeated Hello keeps it.
    """

    role: Role
    name: PeerName
    machine: str
    pid: int
    workers: tuple[WorkerOffer, ...] = ()
    model: ModelCard | None = None
    data: str = ""  # endpoint of its data connection
    tokenizer: bytes = b""  # tokenizer bundle (tinker.tokens), so that hosts need no copy of the model
    incarnation: int = 0
    holding: tuple[Held, ...] = ()  # what the workers of a task server serve already


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive although I have nothing to say. A task server says what it holds: what is not wanted any more it is told again."""

    holding: tuple[Held, ...] = ()
    runs: tuple[RunId, ...] = ()  # those that it keeps anything of


@dataclass(frozen=True, slots=True)
class Bye:
    """I leave on purpose."""

    reason: str


# --- from hosts ---


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """An agent as the coordinator sees it: who it is, whose weights it plays with, and when it updates.

    `every`: it updates in rounds divisible by this; 0: frozen, never. `max_lag`: so many of its updates may still be missing when a
    rollout begins (0: none). If that of any agent is above 0, updates are no phase of the round: they overlap the next rollouts.
    """

    name: AgentName
    policy: PolicyName
    every: int = 1
    max_lag: int = 0


class Straggler(StrEnum):
    """What becomes of whoever has not come to a barrier by its deadline."""

    WAIT = "wait"  # they are waited for, and named
    DROP = "drop"  # agents are left out of the rest of the round, episodes are dropped
    FAIL = "fail"  # the run stops, and the reason names them


@dataclass(frozen=True, slots=True)
class BarrierRule:
    """How long one global barrier may stay shut, in seconds since the one before it opened, and what happens then.

    `quorum`: with `drop`, this many must have come (agents, or episodes accounted for), else the run stops as with `fail`.
    """

    phase: Phase
    edge: Edge
    deadline: float
    straggler: Straggler = Straggler.WAIT
    quorum: int = 1


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run as the coordinator sees it. It never sees scenario code.

    `groups` x `group_size` episodes make a round's rollout; `evaluations` episodes make an evaluate phase, which follows
    every `evaluate_every`-th round (0: never) and the last one, and precedes round 1 as the only phase of round 0.
    `update_order`: groups of agents that update together, one group after the other; () means all together.
    `capacity`: episodes that the learner host plays at once. `terms`: what further hosts must agree to; `setup`: what they need to
    play, which the coordinator hands on unread.
    `barriers`: those that have a deadline, each once; the others wait as long as it takes. `worker_deadline`: seconds that the run waits
    for another worker when its last one of a kind is gone (0: it stops at once). `operation_deadline`: seconds after which a worker that
    has not done an operation is given up (0: never). `done`: rounds that were played before, by a run that this one goes on with.
    """

    run: RunId
    scenario: str
    agents: tuple[AgentSpec, ...]
    rounds: int
    groups: int
    group_size: int
    evaluations: int
    evaluate_every: int
    update_order: tuple[tuple[AgentName, ...], ...] = ()
    model: str = ""  # digest or name of the base model it needs; "": whatever there is
    turn_deadline: float = 120.0
    barriers: tuple[BarrierRule, ...] = ()
    capacity: int = 256
    terms: tuple[Term, ...] = ()
    setup: bytes = b""
    worker_deadline: float = 0.0
    operation_deadline: float = 0.0
    done: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    spec: RunSpec


@dataclass(frozen=True, slots=True)
class Arrive:
    """Agent `agent` has arrived at a barrier. `version`: what it will play with; `samples`: rows of its batch (update start);
    `digest`: of that version's adapter, if it says so ("": it does not)."""

    run: RunId
    round: int
    phase: Phase
    edge: Edge
    agent: AgentName
    version: int
    samples: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Several agents of one connection arrive at a barrier together: the same as an `Arrive` of each, all or none of them.

    In columns: `agents[k]` comes with `versions[k]`, and with `samples[k]` rows (samples (): none has any) and the
    adapter `digests[k]` (digests (): none says).
    """

    run: RunId
    round: int
    phase: Phase
    edge: Edge
    agents: tuple[AgentName, ...]
    versions: tuple[int, ...]
    samples: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeatRequest:
    """What one admitted seat needs: an answer of `policy` to `prompt` (the seat's whole context so far)."""

    seat: SeatName
    policy: PolicyVersion
    prompt: PackedIds
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """Open one turn: these seats are admitted, all others are pending until it closes. `deadline`: seconds from receipt."""

    turn: TurnId
    requests: tuple[SeatRequest, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """One episode is accounted for. Its turns are closed; its workers may forget its cache."""

    run: RunId
    episode: EpisodeId
    ended: Ended
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Operate:
    """Run an operation on the worker that holds `policy`. Answered by `OperationDone` or `OperationFailed` with the same id."""

    run: RunId
    op: OpId
    agent: AgentName
    policy: PolicyName
    operation: Operation


@dataclass(frozen=True, slots=True)
class EndRun:
    run: RunId
    reason: str


@dataclass(frozen=True, slots=True)
class Enlist:
    """I am a further host of this run: I play `capacity` of its episodes at once, and learn nothing. Answered by `Enlisted`, or by `Queued`
    while the run waits. `terms`: what my scenario is; a run of another one refuses me."""

    run: RunId
    scenario: str
    capacity: int
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True)
class Retire:
    """Deal me nothing more of this run; what I have in hand I play to its end. Answered by `Settled` without deals."""

    run: RunId


@dataclass(frozen=True, slots=True)
class InHand:
    """What I was dealt and am not done with. Whatever else I should have is told again (`Play`), whatever I should not is `Settled`."""

    run: RunId
    deals: tuple[Dealt, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """A further host has played these episodes of what it was dealt; they lie in `bundle`. Said again until the deal is settled."""

    run: RunId
    deal: Dealt
    episodes: tuple[EpisodeId, ...]
    bundle: BlobRef


# --- from task servers ---


@dataclass(frozen=True, slots=True)
class Generated:
    """A worker's answer: ids and logprobs of the same length, why it stopped, and the version that sampled every id."""

    turn: TurnId
    seat: SeatName
    worker: WorkerName
    ids: PackedIds
    logprobs: PackedFloats
    finish: Finish
    version: PolicyVersion
    busy: float = 0.0  # seconds from admission to the batch until the last token
    engine: float = 0.0  # seconds the engine had been at work in all, when it answered


@dataclass(frozen=True, slots=True)
class GenerateFailed:
    turn: TurnId
    seat: SeatName
    worker: WorkerName
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker serves this version from now on."""

    run: RunId
    worker: WorkerName
    version: PolicyVersion
    digest: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    run: RunId
    worker: WorkerName
    version: PolicyVersion
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDone:
    run: RunId
    op: OpId
    worker: WorkerName
    result: Result


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """`lost`: what it lacks to do it."""

    run: RunId
    op: OpId
    worker: WorkerName
    reason: str
    lost: Lost = Lost.NOTHING


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker of this task server died and was given up (its restarts are spent)."""

    worker: WorkerName
    reason: str


ToCoordinator = (
    Hello
    | Heartbeat
    | Bye
    | Submit
    | Arrive
    | Arrivals
    | OpenTurn
    | EpisodeEnded
    | Operate
    | EndRun
    | Enlist
    | Retire
    | InHand
    | Played
    | Generated
    | GenerateFailed
    | Loaded
    | LoadFailed
    | WorkerDone
    | WorkerFailed
    | WorkerLost
)
