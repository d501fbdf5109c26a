"""The updates of a run's agents as their learner host sees them: which operations, in which order, and what they left.

Nothing here waits for anybody but the workers: who may update when is the run loop's and the coordinator's business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agents.learner import Learner
from coordinator.app.cast import Role
from coordinator.app.checkpoints import Place
from coordinator.app.progress import Progress
from coordinator.app.rundir import RunDirectory
from tinker.client import Client, OperationError
from tinker.engines.engine import Files
from tinker.pools.holding import LEARNER
from tinker.pools.update import bundle_name
from tinker.protocol.batches import FILE, Row, encode_rows
from tinker.protocol.operations import (
    Attach,
    ForwardBackward,
    LoadState,
    Lost,
    Measured,
    Operation,
    OptimStep,
    Publish,
    Published,
    Result,
    Rewind,
    Saved,
    SaveState,
)
from tinker.protocol.to_coordinator import Operate
from tinker.protocol.values import AdamSpec, BlobRef, LossSpec, OpId, RunId

ATTEMPTS = 5  # how often a step is done whose worker died before it had committed it


class Bundles(Protocol):
    """The data plane as the learner needs it."""

    async def put(self, name: str, files: Files) -> BlobRef: ...

    async def get(self, ref: BlobRef) -> Files: ...

    def drop(self, ref: BlobRef) -> None: ...


@dataclass(slots=True)
class Agent:
    """One agent while it learns. `version`: the newest published one, `adapter`: where it lies; `published`: every one so far (numbers may
    have gaps). `asked`: the last version it asked to publish (one that was refused is never used for other weights). `fenced`: it was left
    out of an update, its weights are not those of its version. `steps`: optimizer steps so far. `saved`: what was last
    saved of it, for which place and what its learner remembered then."""

    role: Role
    learner: Learner
    version: int = 0
    adapter: BlobRef | None = None
    published: list[int] = field(default_factory=list)
    asked: int = 0
    fenced: bool = False
    steps: int = 0
    operations: int = 0
    saved: tuple[Place, bytes, Files] | None = None

    @property
    def digest(self) -> str:
        """Of its version's adapter."""
        return self.adapter.digest if self.adapter is not None else ""


@dataclass(frozen=True, slots=True)
class Updater:
    """Runs the operations of every agent of one run, and keeps what is published. Calls for different agents may run at once."""

    client: Client
    run: RunId
    seed: int
    bundles: Bundles
    directory: RunDirectory
    progress: Progress

    async def attach(self, agent: Agent) -> None:
        """The agent gets its fresh adapter, version 0."""
        result = await self._operate(agent, Attach(agent.role.lora(self.seed)))
        assert isinstance(result, Published)
        await self._save(agent, result)

    async def restore(self, agent: Agent, place: Place, state: Files) -> None:
        """The agent goes on from a checkpoint. RunDirectoryError if its weights are not those of its version, which is on disk."""
        agent.learner.restore(json.loads(state[LEARNER]))
        ref = await self.bundles.put(bundle_name(agent.role.policy, "state"), state)
        try:
            result = await self._operate(agent, LoadState(ref, place.version))
        finally:
            self.bundles.drop(ref)
        assert isinstance(result, Published)
        await self._save(agent, result)
        agent.asked, agent.steps, agent.published = place.asked, place.steps, list(place.published)

    async def save(self, agent: Agent) -> tuple[Place, Files]:
        """Everything of the agent that a checkpoint needs. What has not changed since the last time is not asked for again."""
        place = Place(agent.version, agent.asked, tuple(agent.published), agent.steps)
        learner = remembered(agent)
        if agent.saved is None or agent.saved[:2] != (place, learner):
            result = await self._operate(agent, SaveState(learner))
            assert isinstance(result, Saved)
            agent.saved = place, learner, await self.bundles.get(result.state)
        return place, agent.saved[2]

    async def learn(self, agent: Agent, rows: Sequence[Row]) -> dict[str, float]:
        """Gradient, optimizer, publish. Returns what was measured. OperationError if nothing was learned; what is refused after a first
        step ends the update, and what was learned is published: the weights have moved."""
        learning = agent.role.learning
        if agent.fenced and agent.adapter is not None:
            await self._measured(agent, Rewind(agent.adapter))
            agent.fenced = False
        clip, cap = learning.ratio_clip, learning.ratio_cap if learning.lags else 0.0
        loss = LossSpec(learning.correction, clip, clip, learning.entropy, learning.kl, cap)
        measured: dict[str, float] = {}
        before = agent.steps
        try:
            for _ in range(learning.epochs):
                measured |= await self._step(agent, rows, loss)
        except OperationError as error:
            if agent.steps == before:
                raise
            measured["count/refused_updates"] = 1.0
            done = f"{agent.steps - before} of {learning.epochs} steps"
            self.progress.note(f"{agent.role.name} ended its update of version {agent.version} after {done}: {error}")
        self.progress.updating(agent.role.name, "publish")
        agent.asked += 1
        result = await self._operate(agent, Publish(agent.asked))
        assert isinstance(result, Published)
        await self._save(agent, result)
        return measured

    async def _step(self, agent: Agent, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        """One gradient and the optimizer's step with it. A worker that dies between the two takes the gradient with it, and the worker
        that goes on from the last commit says so: then both are done again, under new ids."""
        for attempt in range(ATTEMPTS):
            batch = bundle_name(agent.role.policy, f"batch-{agent.operations:06d}")
            ref = await self.bundles.put(batch, {FILE: encode_rows(rows)})
            try:
                self.progress.updating(agent.role.name, "gradient")
                measured = await self._measured(agent, ForwardBackward(ref, loss))
                gradient = (_op_id(agent),)
                self.progress.updating(agent.role.name, "optimizer")
                measured |= await self._measured(agent, OptimStep(_adam(agent), gradient, remembered(agent)))
                agent.steps += 1
                return measured
            except OperationError as error:
                if error.lost != Lost.GRADIENT or attempt == ATTEMPTS - 1:
                    raise
                self.progress.note(f"{agent.role.name} does a step of its update again: {error}")
            finally:
                self.bundles.drop(ref)
        raise AssertionError("the last attempt returns or raises")

    async def _measured(self, agent: Agent, operation: Operation) -> dict[str, float]:
        result = await self._operate(agent, operation)
        assert isinstance(result, Measured)
        return {metric.name: metric.value for metric in result.metrics}

    async def _operate(self, agent: Agent, operation: Operation) -> Result:
        agent.operations += 1
        return await self.client.operate(
            Operate(self.run, _op_id(agent), agent.role.name, agent.role.policy, operation)
        )

    async def _save(self, agent: Agent, published: Published) -> None:
        agent.version, agent.adapter = published.version.version, published.adapter
        agent.published.append(agent.version)
        files = await self.bundles.get(published.adapter)
        self.directory.save_adapter(agent.role.name, published.version.version, files)


def _op_id(agent: Agent) -> OpId:
    """The id of the operation that the agent asked for last."""
    return OpId(f"{agent.role.policy}/op{agent.operations}")


def remembered(agent: Agent) -> bytes:
    """What the agent's learner must remember with its weights."""
    return json.dumps(agent.learner.state(), sort_keys=True).encode()


def _adam(agent: Agent) -> AdamSpec:
    learning = agent.role.learning
    lr = learning.lr * min(1.0, (agent.steps + 1) / learning.warmup) if learning.warmup else learning.lr
    return AdamSpec(lr, learning.beta1, learning.beta2, weight_decay=learning.weight_decay, clip=learning.clip)
