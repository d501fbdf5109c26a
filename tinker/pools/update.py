"""Workers of the update and forward pools: one operation at a time, each once.

An operation that comes again (same id) gets the stored result of the first time (I7). Whatever goes wrong comes back as `WorkerFailed` with
a reason, and the worker goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from tinker.engines.engine import Engine, EngineError, Files
from tinker.pools.rollout import Fetch, Post
from tinker.protocol.batches import FILE, Row, decode_rows
from tinker.protocol.operations import (
    Attach,
    ForwardBackward,
    Measured,
    Operation,
    OptimStep,
    Publish,
    Published,
    Result,
    Rewind,
    Score,
    Scored,
)
from tinker.protocol.to_coordinator import WorkerDone, WorkerFailed
from tinker.protocol.to_taskserver import Release, Work
from tinker.protocol.values import BlobRef, Metric, OpId, PolicyName, PolicyVersion, RunId, pack_floats
from tinker.runtime.actor import Actor

Keep = Callable[[str, Files], BlobRef]
STORED = 256


class OperationWorker(Actor[Work | Release, None]):
    """One update or forward worker. `keep` puts a bundle on the data plane and returns where it lies."""

    def __init__(self, engine: Engine, post: Post, fetch: Fetch, keep: Keep) -> None:
        self._engine = engine
        self._post = post
        self._fetch = fetch
        self._keep = keep
        self._results: dict[OpId, Result] = {}
        self._policies: dict[PolicyName, RunId] = {}

    async def receive(self, message: Work | Release) -> None:
        if isinstance(message, Release):
            for policy in [name for name, run in self._policies.items() if run == message.run]:
                await self._engine.detach(policy)
                del self._policies[policy]
            return
        try:
            result = self._results.get(message.op) or await self._do(message.run, message.policy, message.operation)
        except EngineError as error:
            self._post(WorkerFailed(message.run, message.op, message.worker, str(error)))
            return
        except Exception as error:  # whatever it is, whoever asked must hear of it
            reason = f"{type(error).__name__}: {error}"
            self._post(WorkerFailed(message.run, message.op, message.worker, reason))
            return
        self._results[message.op] = result
        while len(self._results) > STORED:
            del self._results[next(iter(self._results))]
        self._post(WorkerDone(message.run, message.op, message.worker, result))

    async def _do(self, run: RunId, policy: PolicyName, operation: Operation) -> Result:
        match operation:
            case Attach():
                self._policies[policy] = run
                return self._published(PolicyVersion(policy, 0), await self._engine.attach(policy, operation.lora))
            case ForwardBackward():
                rows = await self._rows(operation.batch)
                return self._measured(await self._engine.forward_backward(policy, rows, operation.loss))
            case OptimStep():
                return self._measured(await self._engine.optim_step(policy, operation.adam))
            case Publish():
                version = PolicyVersion(policy, operation.version)
                return self._published(version, await self._engine.publish(policy))
            case Rewind():
                await self._engine.rewind(policy, await self._fetch(operation.adapter))
                return self._measured({})
            case Score():
                scores = await self._engine.score(operation.under, await self._rows(operation.batch))
                flat = pack_floats(value for row in scores for value in row)
                return Scored(self._keep(f"{operation.batch.name}-scores", {"logprobs.f32": flat}))

    async def _rows(self, batch: BlobRef) -> list[Row]:
        return decode_rows((await self._fetch(batch))[FILE])

    def _measured(self, numbers: dict[str, float]) -> Measured:
        numbers = {**numbers, "engine_seconds": self._engine.busy_seconds}
        return Measured(tuple(Metric(name, float(value)) for name, value in numbers.items()))

    def _published(self, version: PolicyVersion, files: Files) -> Published:
        return Published(version, self._keep(version_bundle(version), files))


def bundle_name(policy: PolicyName, what: str) -> str:
    """The name of a policy's bundle on the data plane: flat, and beginning with the run's name."""
    return f"{policy.replace('/', '=')}={what}"


def version_bundle(version: PolicyVersion) -> str:
    """The bundle of a published version."""
    return bundle_name(version.policy, f"v{version.version:06d}")
