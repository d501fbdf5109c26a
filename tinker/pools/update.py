"""Workers of the update and forward pools: one operation of a policy at a time, in the order in which they came, each once.

Policies do not wait for one another: a slow update of one agent holds up nobody else's (how much they really do at once is the engine's
business).

An operation that comes again (same id) gets the stored result of the first time (I7). What moves weights is committed, with its result,
before it is answered (`tinker.pools.holding`): then this holds also for a worker that was started again. Whatever goes wrong comes back as
`WorkerFailed` with a reason, and the worker goes on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import structlog
from anyio.abc import TaskGroup

from tinker.engines.engine import Engine, EngineError, Files
from tinker.pools.holding import LEARNER, Held, Holding, NotHere
from tinker.pools.rollout import Fetch, Post
from tinker.protocol.batches import FILE, Row, decode_rows
from tinker.protocol.operations import (
    Attach,
    ForwardBackward,
    LoadState,
    Lost,
    Measured,
    OptimStep,
    Publish,
    Published,
    Result,
    Rewind,
    Saved,
    SaveState,
    Score,
    Scored,
)
from tinker.protocol.to_coordinator import WorkerDone, WorkerFailed
from tinker.protocol.to_taskserver import Release, Work
from tinker.protocol.values import BlobRef, Metric, OpId, PolicyName, PolicyVersion, RunId, pack_floats
from tinker.runtime.actor import Actor
from tinker.runtime.bundles import BulkError

STORED = 256
log = structlog.get_logger("taskserver")


class Bundles(Protocol):
    """Where a worker keeps its bundles."""

    def put(self, name: str, files: Files) -> BlobRef: ...

    def remove(self, name: str) -> None: ...


@dataclass(slots=True)
class Lane:
    """The operations of one policy that are not done yet."""

    run: RunId
    waiting: deque[Work] = field(default_factory=deque)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)


class OperationWorker(Actor[Work | Release, None]):
    """One update or forward worker. `store` is where its bundles lie on the data plane, `holding` the policies that it updates; `tasks`
    outlives the worker."""

    def __init__(
        self, engine: Engine, post: Post, fetch: Fetch, store: Bundles, holding: Holding, tasks: TaskGroup
    ) -> None:
        self._engine = engine
        self._post = post
        self._fetch = fetch
        self._store = store
        self._holding = holding
        self._results: dict[OpId, Result] = {}
        self._saved: dict[PolicyName, str] = {}
        self._tasks = tasks
        self._lanes: dict[PolicyName, Lane] = {}  # of the policies that are worked on

    async def receive(self, message: Work | Release) -> None:
        if isinstance(message, Release):
            self._tasks.start_soon(self._release, message.run, name=f"release {message.run}")
            return
        lane = self._lanes.get(message.policy)
        if lane is None:
            lane = self._lanes[message.policy] = Lane(message.run)
            self._tasks.start_soon(self._work_off, message.policy, lane, name=f"operations of {message.policy}")
        lane.waiting.append(message)

    async def stopped(self) -> None:
        for lane in self._lanes.values():
            lane.scope.cancel()

    async def _release(self, run: RunId) -> None:
        """The run is over, once what was begun for it is done."""
        for lane in [lane for lane in self._lanes.values() if lane.run == run]:
            await lane.done.wait()
        try:
            await self._holding.release(run)
        except Exception as error:  # nobody waits for it, and the worker goes on
            log.error("not released", run=run, why=f"{type(error).__name__}: {error}")

    async def _work_off(self, policy: PolicyName, lane: Lane) -> None:
        """Everything that waits for this policy, one after the other."""
        try:
            with lane.scope:
                while lane.waiting:
                    await self._work(lane.waiting.popleft())
        finally:
            del self._lanes[policy]
            lane.done.set()

    async def _work(self, message: Work) -> None:
        where = message.run, message.op, message.worker
        try:
            result = self._results.get(message.op) or await self._do(message)
        except NotHere as error:
            self._post(WorkerFailed(*where, str(error), error.lost))
            return
        except EngineError as error:
            self._post(WorkerFailed(*where, str(error)))
            return
        except Exception as error:  # whatever it is, whoever asked must hear of it
            self._post(WorkerFailed(*where, f"{type(error).__name__}: {error}"))
            return
        self._results[message.op] = result
        while len(self._results) > STORED:
            del self._results[next(iter(self._results))]
        self._post(WorkerDone(*where, result))

    async def _do(self, work: Work) -> Result:
        policy, operation = work.policy, work.operation
        if isinstance(operation, Score):
            scores = await self._engine.score(operation.under, await self._rows(operation.batch))
            flat = pack_floats(value for row in scores for value in row)
            return Scored(self._store.put(f"{operation.batch.name}-scores", {"logprobs.f32": flat}))
        held = await self._holding.find(work.run, policy)
        if isinstance(operation, Attach | LoadState):
            return await self._begin(work, held)
        if held is None:
            raise NotHere(f"policy {policy} is not attached here, and nobody has committed it here", Lost.POLICY)
        return held.done.get(work.op) or await self._update(work, held)

    async def _begin(self, work: Work, held: Held | None) -> Published:
        """Attach the policy, fresh or as it was saved. What was begun and committed before is published again."""
        policy, operation = work.policy, work.operation
        version = PolicyVersion(policy, operation.version if isinstance(operation, LoadState) else 0)
        if held is not None and work.op not in held.done and isinstance(operation, Attach):
            raise EngineError(f"policy {policy} is attached already: detach it first, or give the new one another name")
        if held is not None and work.op in held.done:
            return self._published(version, await self._engine.publish(policy))
        fresh = held or self._holding.fresh(work.run, policy)
        try:
            if isinstance(operation, LoadState):
                state = await self._fetch(operation.state)
                await self._engine.load_state(policy, state)
                fresh.learner = state.get(LEARNER, b"")
            else:
                assert isinstance(operation, Attach)
                await self._engine.attach(policy, operation.lora)
            published = self._published(version, await self._engine.publish(policy))
            fresh.done[work.op] = published
            await self._holding.commit(policy, fresh)
        except Exception:
            await self._holding.drop(policy)
            raise
        return published

    async def _update(self, work: Work, held: Held) -> Result:
        policy, operation = work.policy, work.operation
        match operation:
            case ForwardBackward():
                return await self._gradient(work, held, operation)
            case OptimStep():
                return await self._step(work, held, operation)
            case Publish():
                version = PolicyVersion(policy, operation.version)
                return self._published(version, await self._engine.publish(policy))
            case Rewind():
                await self._engine.rewind(policy, await self._fetch(operation.adapter))
                return await self._committed(work, held, self._measured({}))
            case SaveState():
                if operation.learner != held.learner:
                    held.learner = operation.learner
                    await self._holding.commit(policy, held)
                return await self._save(policy, held)
        raise EngineError(f"an update worker does not do {type(operation).__name__}")

    async def _gradient(self, work: Work, held: Held, operation: ForwardBackward) -> Measured:
        try:
            rows = await self._rows(operation.batch)
        except BulkError as error:  # it lay at a task server that is gone
            raise NotHere(f"the batch did not come: {error}", Lost.GRADIENT) from error
        try:
            measured = self._measured(await self._engine.forward_backward(work.policy, rows, operation.loss))
        except Exception:  # what had accumulated may be gone, or half of this added to it
            await self._holding.forget_gradient(work.policy, held)
            raise
        held.gradients.append(work.op)
        return measured

    async def _step(self, work: Work, held: Held, operation: OptimStep) -> Result:
        if operation.gradients and list(operation.gradients) != held.gradients:
            there, wanted = ", ".join(held.gradients) or "none", ", ".join(operation.gradients)
            await self._holding.forget_gradient(work.policy, held)
            raise NotHere(
                f"the step needs the gradients of {wanted}, here are {there} since the last commit: do them again",
                Lost.GRADIENT,
            )
        try:
            measured = self._measured(await self._engine.optim_step(work.policy, operation.adam))
        except Exception:
            await self._holding.forget_gradient(work.policy, held)
            raise
        held.learner = operation.learner or held.learner
        return await self._committed(work, held, measured)

    async def _committed(self, work: Work, held: Held, result: Result) -> Result:
        held.done[work.op] = result
        await self._holding.commit(work.policy, held)
        return result

    async def _save(self, policy: PolicyName, held: Held) -> Saved:
        """The committed state as a bundle; the one before is not needed any more."""
        name = bundle_name(policy, f"state-{held.number:06d}")
        saved = Saved(self._store.put(name, await self._holding.files(policy, held)))
        before, self._saved[policy] = self._saved.get(policy, name), name
        if before != name:
            self._store.remove(before)
        return saved

    async def _rows(self, batch: BlobRef) -> list[Row]:
        return decode_rows((await self._fetch(batch))[FILE])

    def _measured(self, numbers: dict[str, float]) -> Measured:
        numbers = {**numbers, "engine_seconds": self._engine.busy_seconds}
        return Measured(tuple(Metric(name, float(value)) for name, value in numbers.items()))

    def _published(self, version: PolicyVersion, files: Files) -> Published:
        return Published(version, self._store.put(version_bundle(version), files))


def bundle_name(policy: PolicyName, what: str) -> str:
    """The name of a policy's bundle on the data plane: flat, and beginning with the run's name."""
    return f"{policy.replace('/', '=')}={what}"


def version_bundle(version: PolicyVersion) -> str:
    """The bundle of a published version."""
    return bundle_name(version.policy, f"v{version.version:06d}")
