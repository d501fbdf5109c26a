"""Messages a task server receives."""

from __future__ import annotations

from dataclasses import dataclass

from tinker.protocol.operations import Operation
from tinker.protocol.values import (
    BlobRef,
    EpisodeId,
    OpId,
    PackedIds,
    Phase,
    PolicyName,
    PolicyVersion,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
)


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer `prompt` with exactly this version, or fail. `deadline`: seconds from receipt after which nobody listens."""

    turn: TurnId
    seat: SeatName
    worker: WorkerName
    policy: PolicyVersion
    prompt: PackedIds
    sampling: Sampling
    deadline: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this answer any more."""

    turn: TurnId
    seat: SeatName
    worker: WorkerName


@dataclass(frozen=True, slots=True)
class Forget:
    """This episode is over: drop what was cached for it."""

    run: RunId
    episode: EpisodeId


@dataclass(frozen=True, slots=True)
class Load:
    """Serve this version besides those already served; answer `Loaded` or `LoadFailed`."""

    run: RunId
    worker: WorkerName
    version: PolicyVersion
    adapter: BlobRef


@dataclass(frozen=True, slots=True)
class Unload:
    run: RunId
    worker: WorkerName
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Work:
    """Run one operation on one worker; answer `WorkerDone` or `WorkerFailed`. A repeated id gets the first answer again."""

    run: RunId
    op: OpId
    worker: WorkerName
    policy: PolicyName
    operation: Operation


@dataclass(frozen=True, slots=True)
class Release:
    """The run is over: free its policies, optimizer states and caches."""

    run: RunId


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove the bundles with the episodes that further hosts played in this phase (`played_bundle`): the learner host has them all."""

    run: RunId
    round: int
    phase: Phase


ToTaskserver = Generate | Cancel | Forget | Load | Unload | Work | Release | Discard
