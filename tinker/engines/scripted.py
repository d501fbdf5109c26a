"""The scripted engine: no model, no torch, the same answers every time. For tests, simulation, and trying a set-up without weights.

It keeps the engine contract in everything but meaning: versions with digests, refusals, accumulated updates that change what is published.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

import anyio
import numpy as np
from safetensors.numpy import load, save

from tinker.engines.checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CLOSED,
    check_files,
    check_lora,
    check_numbers,
    check_request,
    check_rows,
    digest_of,
    loss_named,
    moves,
    not_attached,
    not_loaded,
    other_weights,
)
from tinker.engines.engine import EngineError, Files, GenerateRequest, Generation
from tinker.engines.states import opened, sealed
from tinker.protocol.batches import Row, encode_rows
from tinker.protocol.values import BASE, AdamSpec, Finish, LoraSpec, LossSpec, ModelCard, PolicyName, PolicyVersion

Replies = Sequence[Sequence[int]] | Callable[[GenerateRequest], list[int]]
CARD = ModelCard("scripted", "scripted", "", vocab=512, context=1024, eos_ids=(2,), lora_targets=LoraSpec().targets)


@dataclass(slots=True)
class Script:
    """What stands for a policy's weights: a digest that every effective step changes, and the digests of batches waiting for one."""

    lora: LoraSpec
    state: str
    waiting: str = ""


class ScriptedEngine:
    """Answers from a list by a hash of (seed, prompt), or by a function of the request.

    An answer ends at its first end-of-sequence or stop id, and is cut at `max_tokens` and at the context like a real one. Its logprobs
    are those of choosing one of the list's answers evenly, spread over its ids. `latency` seconds pass before each answer, by `sleep`.
    """

    name = "scripted"
    busy_seconds = 0.0  # there is no model to be busy

    def __init__(
        self,
        card: ModelCard = CARD,
        replies: Replies = ((2,),),
        latency: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._card = card
        self._replies = replies
        self._latency = latency
        self._sleep = sleep
        self._served: dict[PolicyVersion, str] = {}
        self._scripts: dict[PolicyName, Script] = {}
        self._waits: set[anyio.CancelScope] = set()
        self._open = False

    @property
    def card(self) -> ModelCard:
        return self._card

    async def __aenter__(self) -> ScriptedEngine:
        self._open = True
        self._served[BASE] = ""
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        for wait in self._waits:
            wait.cancel()

    # --- rollout ---

    async def load(self, version: PolicyVersion, adapter: Files) -> None:
        self._check_open()
        check_files(adapter)
        digest = digest_of(adapter)
        if self._served.get(version, digest) != digest:
            raise other_weights(version)
        self._served[version] = digest

    async def unload(self, version: PolicyVersion) -> None:
        self._check_open()
        if version != BASE:
            self._served.pop(version, None)

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check_open()
        self._check_loaded(request.policy)
        check_request(request, self._card)
        if self._latency > 0.0:
            await self._wait()
        room = self._card.context - len(request.prompt)
        if room <= 0:
            return Generation([], [], Finish.CONTEXT, request.policy)
        ids, choices = self._reply(request)
        ends = {*self._card.eos_ids, *request.sampling.stop_ids}
        end = next((place for place, token in enumerate(ids, start=1) if token in ends), None)
        budget = min(room, request.sampling.max_tokens)
        if end is not None and end <= budget:
            ids, finish = ids[:end], Finish.STOP
        else:
            ids, finish = ids[:budget], Finish.LENGTH if request.sampling.max_tokens <= room else Finish.CONTEXT
        logprob = -math.log(choices) / len(ids)
        return Generation(ids, [logprob] * len(ids), finish, request.policy, busy=self._latency)

    async def forget(self, cache_key_prefix: str) -> None:
        self._check_open()

    # --- forward ---

    async def score(self, under: PolicyVersion, rows: Sequence[Row]) -> list[list[float]]:
        """Every token is as likely as any other."""
        self._check_open()
        self._check_loaded(under)
        check_rows(rows, self._card)
        even = -math.log(self._card.vocab)
        return [[0.0, *[even] * (len(row.ids) - 1)][: len(row.ids)] for row in rows]

    # --- update ---

    async def attach(self, policy: PolicyName, lora: LoraSpec) -> Files:
        self._check_open()
        check_lora(policy, lora, self._card)
        if policy in self._scripts:
            raise EngineError(f"policy {policy} is attached already: detach it first, or give the new one another name")
        self._scripts[policy] = Script(lora, _mixed(repr(lora)))
        return await self.publish(policy)

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        script = self._find(policy)
        kind = loss_named(loss)
        check_rows(rows, self._card)
        check_numbers(rows)
        useful = [row for row in rows if moves(row, kind, loss)]
        if useful:
            script.waiting = _mixed(script.waiting, repr(loss), hashlib.sha256(encode_rows(useful)).hexdigest())
        metrics = dict.fromkeys(("loss", "entropy", "kl", "clip_fraction", "logprob_gap_max", "logprobs_missing"), 0.0)
        tokens = float(sum(int(row.mask.sum()) for row in rows))
        return metrics | {
            "tokens": tokens,
            "ratio_mean": float(bool(useful)),
            "rows_skipped": float(len(rows) - len(useful)),
        }

    async def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        script = self._find(policy)
        if not script.waiting:
            return {"grad_norm": 0.0, "stepped": 0.0}
        script.state = _mixed(script.state, script.waiting, repr(adam))
        script.waiting = ""
        return {"grad_norm": 1.0, "stepped": 1.0}

    async def publish(self, policy: PolicyName) -> Files:
        script = self._find(policy)
        config = {
            "base_model_name_or_path": self._card.name,
            "peft_type": "LORA",
            "r": script.lora.rank,
            "lora_alpha": script.lora.alpha,
        }
        return {ADAPTER_CONFIG: json.dumps(config, sort_keys=True).encode(), ADAPTER_WEIGHTS: _weights(script.state)}

    async def rewind(self, policy: PolicyName, adapter: Files) -> None:
        script = self._find(policy)
        check_files(adapter)
        try:
            state = load(adapter[ADAPTER_WEIGHTS])["state"]
        except Exception as reason:
            raise EngineError(
                f"{ADAPTER_WEIGHTS} is not of this engine ({reason}): rewind {policy} to a version that it published"
            ) from reason
        script.state, script.waiting = state.tobytes().hex(), ""

    async def save_state(self, policy: PolicyName) -> Files:
        script = self._find(policy)
        return sealed(self.name, self._card, asdict(script.lora), _weights(script.state))

    async def load_state(self, policy: PolicyName, state: Files) -> None:
        self._check_open()
        facts, tensors = opened(state, self.name, self._card)
        lora = LoraSpec(**{**facts, "targets": tuple(facts["targets"])})
        check_lora(policy, lora, self._card)
        self._scripts[policy] = Script(lora, load(tensors)["state"].tobytes().hex())

    async def detach(self, policy: PolicyName) -> None:
        self._check_open()
        self._scripts.pop(policy, None)

    # --- inside ---

    def _reply(self, request: GenerateRequest) -> tuple[list[int], int]:
        """The answer's ids, never empty, and among how many it was chosen. Greedy does not look at the seed."""
        if callable(self._replies):
            ids, choices = list(self._replies(request)), 1
        else:
            seed = request.sampling.seed if request.sampling.temperature > 0.0 else 0
            choices = len(self._replies)
            ids = list(self._replies[int(_mixed(str(seed), repr(list(request.prompt)))[:15], 16) % choices])
        return ids or [*self._card.eos_ids, 0][:1], choices

    async def _wait(self) -> None:
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                await self._sleep(self._latency)
            finally:
                self._waits.discard(scope)
        self._check_open()

    def _find(self, policy: PolicyName) -> Script:
        self._check_open()
        if policy not in self._scripts:
            raise not_attached(self._scripts, policy)
        return self._scripts[policy]

    def _check_loaded(self, version: PolicyVersion) -> None:
        if version not in self._served:
            raise not_loaded(self._served, version)

    def _check_open(self) -> None:
        if not self._open:
            raise EngineError(CLOSED)


def _weights(state: str) -> bytes:
    return save({"state": np.frombuffer(bytes.fromhex(state), np.uint8)})


def _mixed(*parts: str) -> str:
    """One digest of several texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
