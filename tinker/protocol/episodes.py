"""What an episode leaves behind: one trajectory per learning seat (for the learner) and one recording (for replay)."""

from __future__ import annotations

from dataclasses import dataclass

from tinker.protocol.values import AgentName, Ended, EpisodeId, PackedFloats, PackedIds, PolicyName, SeatName


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a trajectory were sampled from this version of its policy."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One seat's token context in one episode, exactly as the engine saw and sampled it.

    `ids` int32[T]; `mask` one byte per token, 1 exactly on the agent's own sampled tokens that may be trained on; `logprobs` float32[T],
    0 where nothing was sampled. `sampled` counts every sampled token, trained or not. `cut` names the limit that cut the last answer.
    """

    seat: SeatName
    agent: AgentName
    policy: PolicyName
    ids: PackedIds
    mask: bytes
    logprobs: PackedFloats
    spans: tuple[Span, ...]
    temperature: float
    sampled: int
    retries: int
    forfeits: int
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened at a seat, in order. kind: brief | hear | ask | reply | complaint (a reply that did not parse)
    | forfeit. `turn` is the table's turn number; `ids` are the sampled token ids of a policy's reply."""

    seat: SeatName
    kind: str
    text: str
    turn: int
    ids: PackedIds = PackedIds(b"")
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    """What one episode needs to be played again. `seed` is the whole seed of `table.rng`; `params` the scenario's parameters, as JSON.
    `evaluation` names the held-out evaluation and how it was sampled ("held-out/greedy"); "" in training."""

    run: str
    episode: EpisodeId
    scenario: str
    version: int
    seed: str
    params: str
    players: tuple[tuple[SeatName, str], ...]
    lines: tuple[Line, ...]
    ended: Ended
    scores: tuple[tuple[SeatName, float], ...]
    reason: str = ""
    evaluation: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished (or failed) play. `scores` has every seat unless the episode failed; a score that was None, NaN or infinite is
    left out and counted in `bad_scores`. Episodes of one `group` share their start. `evaluation` names the held-out evaluation."""

    episode: EpisodeId
    group: int
    ended: Ended
    scores: tuple[tuple[SeatName, float], ...]
    measures: tuple[tuple[str, float], ...]
    trajectories: tuple[Trajectory, ...]
    recording: Recording
    bad_scores: int = 0
    evaluation: str = ""
    seconds: float = 0.0
    scenario_seconds: float = 0.0
