"""The waist between pools and models: what an engine must do, whatever runs inside it.

One engine object serves the rollout, forward and update workers of one task server, so that they share the base model. Every method is
called from the event loop and must not block it for long; heavy work happens elsewhere (the torch engine has one thread that owns the
model). All implementations pass `tests/tinker/engines/conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, Finish, LoraSpec, LossSpec, ModelCard, PolicyName, PolicyVersion, Sampling

Files = Mapping[str, bytes]  # a PEFT directory: adapter_config.json and adapter_model.safetensors


class EngineError(Exception):
    """The engine refused: the message says what was found, what was expected, and who should do what. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer wanted. `cache_key` names the (run, episode, seat) whose context grows from request to request, so that its KV may be
    re-used by prefix; it never changes the answer."""

    cache_key: str
    policy: PolicyVersion
    prompt: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer. `ids` and `logprobs` have equal length; `busy` is the time in seconds the request spent in the running batch."""

    ids: list[int]
    logprobs: list[float]
    finish: Finish
    version: PolicyVersion
    busy: float = 0.0


class Engine(Protocol):
    """See the module. Used as an async context manager: entering loads the model, leaving frees it and answers every waiter.
    `busy_seconds`: how long the model has been at work so far (generation and updates), on the monotonic clock."""

    @property
    def busy_seconds(self) -> float: ...

    @property
    def name(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc: object) -> None: ...

    # --- rollout ---

    async def load(self, version: PolicyVersion, adapter: Files) -> None:
        """Serve this version too. Loading the same version with the same bytes again is a no-op; with other bytes: EngineError."""

    async def unload(self, version: PolicyVersion) -> None:
        """Stop serving it. Requests in flight on it finish first. Unknown versions are ignored."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Refuses (EngineError) a version it does not hold, and ids outside the vocabulary. A prompt that leaves no room gives an empty
        CONTEXT answer. Cancelling the caller takes the request out of the batch."""

    async def forget(self, cache_key_prefix: str) -> None:
        """Free cached context of every key that begins with this."""

    # --- forward ---

    async def score(self, under: PolicyVersion, rows: Sequence[Row]) -> list[list[float]]:
        """Per row, the logprob of each token t >= 1 given those before it at the row's temperature (0.0 at t = 0)."""

    # --- update ---

    async def attach(self, policy: PolicyName, lora: LoraSpec) -> Files:
        """Make a trainable adapter (seeded; B = 0) with an optimizer of its own. Returns its files (version 0)."""

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        """Accumulate the gradient of sum_t weights[t] * loss_t. Returns at least loss, tokens, entropy, kl, ratio_mean, clip_fraction,
        logprob_gap_max (|re-scored - sampled|, nats). A non-finite gradient is refused with EngineError and the accumulation dropped."""

    async def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        """Clip and apply this policy's accumulated gradient. Returns grad_norm (before clipping) and stepped (0.0 or 1.0)."""

    async def publish(self, policy: PolicyName) -> Files:
        """The policy's current weights as adapter files."""

    async def rewind(self, policy: PolicyName, adapter: Files) -> None:
        """The policy's weights are those of these files, which it published; no gradient and no momentum is left. EngineError, and
        nothing has changed, if the files are of another shape."""

    async def save_state(self, policy: PolicyName) -> Files:
        """All that training the policy needs later: weights, what the optimizer remembers, how it is adapted (`tinker.engines.states`).
        An accumulated gradient is not part of it. The same state always gives the same bytes."""

    async def load_state(self, policy: PolicyName, state: Files) -> None:
        """The policy is what it was when this was saved, attached now if it was not, and has no gradient: from here on training goes on
        as it did from there. EngineError, and nothing has changed, if the files are damaged, or of another engine or base model."""

    async def detach(self, policy: PolicyName) -> None:
        """Free a policy's weights and optimizer. Unknown policies are ignored."""
