"""The engine of a simulated task server: scripted, slow by seed, failing when told to, and every effect seen by the witness."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from sim_witness import Witness

from tinker.engines.engine import EngineError, Files, GenerateRequest, Generation
from tinker.engines.scripted import ScriptedEngine
from tinker.models import DEMO
from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, LoraSpec, LossSpec, ModelCard, PolicyName, PolicyVersion
from tinker.tokens import Tokenizer, check_model_dir

TOKENIZER = Tokenizer.from_dir(Path(DEMO))
FACTS = check_model_dir(Path(DEMO))
EOS = TOKENIZER.eos_ids[0]
CARD = ModelCard(
    FACTS.name, "scripted", TOKENIZER.digest, FACTS.vocab, FACTS.context, TOKENIZER.eos_ids, LoraSpec().targets
)
REPLIES = tuple([*TOKENIZER.encode(text), EOS] for text in ("1", "2", "7", "9", "no"))


@dataclass(slots=True)
class Mood:
    """How engines fail now: probabilities of each call, and seconds that a generation takes (from, to)."""

    generate: float = 0.0
    load: float = 0.0
    update: float = 0.0
    stale: float = 0.0  # the answer comes from the version before
    forget: float = 0.0  # raises out of the worker, which ends it (it is started again a few times)
    latency: tuple[float, float] = (0.001, 0.3)


class SimEngine(ScriptedEngine):
    """See the module. `server`: the process it lives in."""

    def __init__(self, server: str, mood: Mood, rng: random.Random, witness: Witness) -> None:
        super().__init__(CARD, REPLIES)
        self._server = server
        self._mood = mood
        self._rng = rng
        self._witness = witness

    async def generate(self, request: GenerateRequest) -> Generation:
        await anyio.sleep(self._rng.uniform(*self._mood.latency))
        self._maybe(self._mood.generate, "out of memory")
        answer = await super().generate(request)
        if self._rng.random() < self._mood.stale:
            self._witness.did["answer of another version"] += 1
            return replace(answer, version=replace(answer.version, version=answer.version.version - 1))
        return answer

    async def load(self, version: PolicyVersion, adapter: Files) -> None:
        await anyio.sleep(self._rng.uniform(0.01, 0.5))
        self._maybe(self._mood.load, "cannot load")
        await super().load(version, adapter)

    async def forget(self, cache_key_prefix: str) -> None:
        self._maybe(self._mood.forget, "cannot forget")
        await super().forget(cache_key_prefix)

    async def attach(self, policy: PolicyName, lora: LoraSpec) -> Files:
        files = await super().attach(policy, lora)
        self._witness.effect(self._server, policy, "Attach")
        return files

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        await anyio.sleep(self._rng.uniform(0.01, 0.5))
        self._maybe(self._mood.update, "the gradient is not finite")
        self._witness.trained(policy, rows)
        self._witness.effect(self._server, policy, "ForwardBackward")
        return await super().forward_backward(policy, rows, loss)

    async def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        self._maybe(self._mood.update, "the optimizer failed")
        self._witness.effect(self._server, policy, "OptimStep")
        return await super().optim_step(policy, adam)

    def _maybe(self, chance: float, why: str) -> None:
        if self._rng.random() < chance:
            self._witness.did[f"engine failed: {why}"] += 1
            raise EngineError(why)
