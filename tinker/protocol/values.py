"""Values that several messages share: names, keys, sampling parameters, specifications, references to bulk data.

Everything here is a frozen value. Arrays travel as packed little-endian bytes (`PackedIds`: int32, `PackedFloats`: float32);
`pack_ids`/`unpack_ids` and `pack_floats`/`unpack_floats` convert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import numpy as np

RunId = NewType("RunId", str)
AgentName = NewType("AgentName", str)
SeatName = NewType("SeatName", str)
PolicyName = NewType("PolicyName", str)
PeerName = NewType("PeerName", str)
WorkerName = NewType("WorkerName", str)
OpId = NewType("OpId", str)
PackedIds = NewType("PackedIds", bytes)
PackedFloats = NewType("PackedFloats", bytes)


class Phase(StrEnum):
    """The parts of a round."""

    ROLLOUT = "rollout"
    UPDATE = "update"
    EVALUATE = "evaluate"


class Edge(StrEnum):
    """The two global barriers of a phase."""

    START = "start"
    END = "end"


class Finish(StrEnum):
    """Why a generation stopped."""

    STOP = "stop"  # end-of-sequence or a stop id was sampled; it is the last id of the answer
    LENGTH = "length"  # max_tokens were sampled
    CONTEXT = "context"  # the model's context is full, or the prompt left no room for an answer


class Ended(StrEnum):
    """How an episode was accounted for."""

    FINISHED = "finished"
    FORFEITED = "forfeited"  # a Forfeit ended it; the scenario's declared forfeit scores count
    FAILED = "failed"  # scenario code raised, returned wrong scores, or ran past its limits
    DROPPED = "dropped"  # given up by the runtime (drain, stop); nothing of it is trained on


class Role(StrEnum):
    """What a peer is to the coordinator."""

    HOST = "host"
    TASKSERVER = "taskserver"
    OPERATOR = "operator"
    PLAYER = "player"
    VIEWER = "viewer"


class PoolKind(StrEnum):
    ROLLOUT = "rollout"
    FORWARD = "forward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, order=True)
class EpisodeId:
    """One episode of a run. `index` counts from 0 within (round, phase)."""

    round: int
    phase: Phase
    index: int

    def __str__(self) -> str:
        return f"{self.round}/{self.phase}/{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class TurnId:
    """One turn of one episode; `number` rises from 0 within the episode, sub-turns (retries) included. `attempt`: of the deal of its
    group (`Dealt`), so that turns of a host that was lost are told from those of the host that plays the episode again."""

    run: RunId
    episode: EpisodeId
    number: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Dealt:
    """A group of episodes as it was dealt to a host. `attempt` rises from 0 whenever the group is dealt anew because its host was lost."""

    round: int
    phase: Phase
    group: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """One thing on which the hosts of a run must agree about its scenario."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one answer.

    `temperature` 0 is greedy (logprobs are then those of temperature 1). Logprobs are log softmax(logits / temperature).
    `seed` belongs to this request alone. `stop_ids` end the answer besides the model's own end-of-sequence ids; the stop id is kept.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Immutable weights. Version 0 is the freshly initialised adapter; `BASE` (policy "") is the model without any adapter."""

    policy: PolicyName
    version: int

    def __str__(self) -> str:
        return f"{self.policy or 'base'}@{self.version}"


BASE = PolicyVersion(PolicyName(""), 0)


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape and initialisation of one policy's adapter (PEFT's meaning of the words; scale = alpha / rank)."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AdamSpec:
    """One optimizer step: AdamW with clipping by the global norm of this policy's own gradient (0: no clipping)."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which registered loss, and its numbers. `entropy` and `kl` are coefficients (kl: to the base model without adapter). `cap`: ratios
    are cut off there (0: they are not)."""

    name: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy: float = 0.0
    kl: float = 0.0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a task server says of the base model it holds. `digest` covers weights and configuration, `tokenizer` its files."""

    name: str
    digest: str
    tokenizer: str
    vocab: int
    context: int
    eos_ids: tuple[int, ...]
    lora_targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A bundle of named files on the data plane. `path` is its directory on `machine`; elsewhere it is fetched from `endpoint`."""

    name: str
    digest: str
    size: int
    machine: str
    path: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    value: float


def pack_ids(ids: Iterable[int]) -> PackedIds:
    """Token ids as little-endian int32; OverflowError if one does not fit."""
    return PackedIds(np.fromiter(ids, "<i4").tobytes())


def unpack_ids(packed: PackedIds) -> list[int]:
    ids: list[int] = np.frombuffer(packed, "<i4").tolist()
    return ids


def pack_floats(values: Iterable[float]) -> PackedFloats:
    """Numbers as little-endian float32."""
    return PackedFloats(np.fromiter(values, "<f4").tobytes())


def unpack_floats(packed: PackedFloats) -> list[float]:
    values: list[float] = np.frombuffer(packed, "<f4").tolist()
    return values
