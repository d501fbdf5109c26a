"""Operations: what a learner asks of forward and update workers, and what comes back.

An operation has an id of its own; it takes effect once, however often it is sent. `policy` names whose weights it is about.
A batch of training rows is a bundle on the data plane (`tinker.protocol.batches` defines its arrays).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tinker.protocol.values import AdamSpec, BlobRef, LoraSpec, LossSpec, Metric, OpId, PolicyVersion


class Lost(StrEnum):
    """What an operation needed and its worker does not have (any more), so that whoever asked can bring it again."""

    NOTHING = ""
    GRADIENT = (
        "gradient"  # accumulated after the last commit: do the `ForwardBackward`s of this step again, under new ids
    )
    POLICY = "policy"  # weights and optimizer: load a state that was saved, and go on from there


@dataclass(frozen=True, slots=True)
class Attach:
    """Make a fresh adapter for the policy (version 0, which changes nothing: B is zero) and publish it."""

    lora: LoraSpec


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Add the gradient of one batch to the policy's accumulated gradient. Weights do not move."""

    batch: BlobRef
    loss: LossSpec


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Apply the accumulated gradient once and clear it. Without a gradient nothing moves, not even by momentum.

    The worker commits weights, optimizer, result and `learner` together before it answers. `gradients` are the operations whose gradient
    is to be applied: if they are not exactly what is accumulated, nothing moves (`Lost.GRADIENT`). (): whatever there is. `learner`: what
    the learner must remember together with these weights.
    """

    adam: AdamSpec
    gradients: tuple[OpId, ...] = ()
    learner: bytes = b""


@dataclass(frozen=True, slots=True)
class Publish:
    """Freeze the current weights as immutable `version` (greater than every earlier one)."""

    version: int


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of the rows' tokens under a kept version, or under the base model (`BASE`)."""

    batch: BlobRef
    under: PolicyVersion


@dataclass(frozen=True, slots=True)
class Rewind:
    """Make the policy's weights those of its published `adapter` again; its gradient and what its optimizer remembers are cleared."""

    adapter: BlobRef


@dataclass(frozen=True, slots=True)
class SaveState:
    """Commit `learner` beside the policy's weights and optimizer, and keep all of it as a bundle."""

    learner: bytes = b""


@dataclass(frozen=True, slots=True)
class LoadState:
    """Go on from a saved state: attach the policy as it was, commit it, and publish its weights as `version`."""

    state: BlobRef
    version: int


Operation = Attach | ForwardBackward | OptimStep | Publish | Score | Rewind | SaveState | LoadState


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of `ForwardBackward`, `OptimStep` and `Rewind`: what happened, in numbers (grad_norm, loss, ...)."""

    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """Result of `Attach`, `LoadState` and `Publish`: the new version as a PEFT directory."""

    version: PolicyVersion
    adapter: BlobRef


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of `Score`: a bundle holding float32 `logprobs`, one per token of the batch (0 where there is none)."""

    logprobs: BlobRef


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of `SaveState`: a bundle for `LoadState`."""

    state: BlobRef


Result = Measured | Published | Scored | Saved
