"""What every engine refuses, in the same words: requests, rows and specifications that cannot be right for its model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tinker.algorithms.losses import Loss, UnknownLoss, find_loss
from tinker.engines.engine import EngineError, Files, GenerateRequest
from tinker.protocol.batches import Row
from tinker.protocol.values import LoraSpec, LossSpec, ModelCard, PolicyName, PolicyVersion

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
CLOSED = "the engine is closed: its task server is stopping; ask another one"


def check_request(request: GenerateRequest, card: ModelCard) -> None:
    """A prompt and a budget that exist, a temperature that is a number, ids that the model knows."""
    prompt, sampling = request.prompt, request.sampling
    if sampling.max_tokens < 1 or not len(prompt):
        raise EngineError(
            f"a request needs a prompt and max_tokens >= 1; got {len(prompt)} ids, max_tokens {sampling.max_tokens}"
        )
    if not 0.0 <= sampling.temperature < float("inf"):
        raise EngineError(
            f"temperature must be a finite number >= 0, not {sampling.temperature}: the player must set it"
        )
    if min(prompt) < 0 or max(prompt) >= card.vocab:
        wrong = next(token for token in prompt if not 0 <= token < card.vocab)
        raise EngineError(
            f"the prompt holds id {wrong} but {card.name} knows 0..{card.vocab - 1}: another tokenizer made it"
        )


def check_rows(rows: Sequence[Row], card: ModelCard) -> None:
    """Names the first row that the model cannot read."""
    for number, row in enumerate(rows):
        if len(row.ids) > card.context:
            raise EngineError(
                f"row {number} has {len(row.ids)} tokens but {card.name} reads {card.context}: the learner must cut it"
            )
        if len(row.ids) and (row.ids.min() < 0 or row.ids.max() >= card.vocab):
            raise EngineError(
                f"row {number} holds ids {row.ids.min()}..{row.ids.max()} but {card.name} knows 0..{card.vocab - 1}: "
                "another tokenizer made it"
            )


def check_numbers(rows: Sequence[Row]) -> None:
    """Names the first row whose trained tokens cannot be trained on."""
    for number, row in enumerate(rows):
        if len(row.mask) and row.mask[0]:
            raise EngineError(
                f"row {number} trains on its first token, which nothing precedes: the learner must mask it"
            )
        for name, values in (("advantage", row.advantages), ("weight", row.weights)):
            if not np.isfinite(values[row.mask]).all():
                raise EngineError(
                    f"row {number} has a non-finite {name}: the learner must mask that row or give it a number"
                )


def check_lora(policy: PolicyName, lora: LoraSpec, card: ModelCard) -> None:
    """A named policy, a positive rank, targets that the model has."""
    unknown = sorted(set(lora.targets) - set(card.lora_targets))
    if unknown or not lora.targets:
        raise EngineError(
            f"{policy or 'the base'} wants to adapt {', '.join(unknown) or 'nothing'}; {card.name} can adapt "
            f"{', '.join(card.lora_targets)}: change the LoRA targets"
        )
    if lora.rank < 1 or not policy:
        raise EngineError(f"a policy needs a name and a rank >= 1; got {policy!r} with rank {lora.rank}")


def check_files(adapter: Files) -> None:
    """Both files of a PEFT directory are there."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if name not in adapter:
            there = ", ".join(sorted(adapter)) or "no files"
            raise EngineError(f"an adapter needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}; got {there}: publish it again")


def digest_of(files: Files) -> str:
    """sha256 over names and contents, in name order."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return total.hexdigest()


def not_attached(policies: Mapping[PolicyName, object], policy: PolicyName) -> EngineError:
    """The refusal of an operation on a policy that is not there."""
    there = ", ".join(sorted(policies)) or "none"
    return EngineError(f"policy {policy} is not attached here (attached: {there}): attach it first")


def not_loaded(versions: Mapping[PolicyVersion, object], version: PolicyVersion) -> EngineError:
    """The refusal of a request for a version that is not there. It is never served by another one."""
    there = ", ".join(map(str, versions))
    return EngineError(
        f"{version} is not loaded here (loaded: {there}): the task server must load it before it is asked for"
    )


def other_weights(version: PolicyVersion) -> EngineError:
    """The refusal of other weights under a name that is taken."""
    return EngineError(
        f"{version} is served already with other weights, and versions are immutable: publish a new version"
    )


def loss_named(spec: LossSpec) -> Loss:
    """The registered loss."""
    try:
        return find_loss(spec.name)
    except UnknownLoss as reason:
        raise EngineError(str(reason)) from reason


def moves(row: Row, loss: Loss, spec: LossSpec) -> bool:
    """Whether any trained token of the row can have a gradient; rows of which this is false may be left out exactly."""
    counts: npt.NDArray[np.bool_] = row.mask & (row.weights != 0.0)
    if loss.by_advantage and spec.entropy == 0.0 and spec.kl == 0.0:
        counts = counts & (row.advantages != 0.0)
    return bool(counts.any())
