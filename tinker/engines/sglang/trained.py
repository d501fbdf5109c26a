"""The update half of an engine whose answers come from elsewhere: everything about training is another engine's."""

from __future__ import annotations

from collections.abc import Sequence

from tinker.engines.engine import Engine, Files
from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, LoraSpec, LossSpec, PolicyName


class TrainedElsewhere:
    """Hands on to `training`, unchanged."""

    def __init__(self, training: Engine) -> None:
        self._training = training

    async def attach(self, policy: PolicyName, lora: LoraSpec) -> Files:
        return await self._training.attach(policy, lora)

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        return await self._training.forward_backward(policy, rows, loss)

    async def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        return await self._training.optim_step(policy, adam)

    async def publish(self, policy: PolicyName) -> Files:
        return await self._training.publish(policy)

    async def rewind(self, policy: PolicyName, adapter: Files) -> None:
        await self._training.rewind(policy, adapter)

    async def save_state(self, policy: PolicyName) -> Files:
        return await self._training.save_state(policy)

    async def load_state(self, policy: PolicyName, state: Files) -> None:
        await self._training.load_state(policy, state)

    async def detach(self, policy: PolicyName) -> None:
        await self._training.detach(policy)
