"""The update worker: what it has committed survives it, and is never done twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup

from tinker.engines.engine import Engine
from tinker.engines.scripted import ScriptedEngine
from tinker.pools.commits import Commits, CommitUnwritable, DiskCommits, MemoryCommits
from tinker.pools.holding import Holding
from tinker.pools.update import OperationWorker
from tinker.protocol.batches import FILE, Row, encode_rows
from tinker.protocol.operations import (
    Attach,
    ForwardBackward,
    LoadState,
    Lost,
    Operation,
    OptimStep,
    Publish,
    Published,
    Rewind,
    Saved,
    SaveState,
)
from tinker.protocol.to_coordinator import WorkerDone, WorkerFailed
from tinker.protocol.to_taskserver import Release, Work
from tinker.protocol.values import AdamSpec, BlobRef, LoraSpec, LossSpec, OpId, PolicyName, RunId, WorkerName
from tinker.runtime.bundles import BundleStore
from tinker.runtime.clock import ManualClock

RUN, ANN = RunId("run"), PolicyName("run/ann")
ADAM, LOSS = AdamSpec(1e-2), LossSpec("importance_sampling")


def batch(number: int) -> Mapping[str, bytes]:
    mask = np.array([False, False, True, True])
    column = np.where(mask, 1.0 + number, 0.0).astype(np.float32)
    return {FILE: encode_rows([Row(np.array([5, 6, 7, 8], np.int32), mask, -column, column, mask.astype(np.float32))])}


@dataclass
class Inline:
    """A task group whose tasks are done when `finish` is awaited."""

    begun: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def start_soon(self, call: Callable[..., Any], *arguments: Any, name: object = None) -> None:
        self.begun.append((call, arguments))

    async def finish(self) -> None:
        while self.begun:
            call, arguments = self.begun.pop(0)
            await call(*arguments)


@dataclass
class Server:
    """One life of a task server with an update worker: a new engine, and what the disk holds."""

    engine: Engine
    store: BundleStore
    commits: Commits
    said: list[Any] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    tasks: Inline = field(default_factory=Inline)
    worker: OperationWorker = field(init=False)

    def __post_init__(self) -> None:
        holding = Holding(self.engine, self.commits, self.clock)
        self.worker = OperationWorker(
            self.engine, self.said.append, self._fetch, self.store, holding, cast(TaskGroup, self.tasks)
        )

    async def _fetch(self, ref: BlobRef) -> Mapping[str, bytes]:
        return self.store.read(ref)

    async def tell(self, message: Work | Release) -> None:
        await self.worker.receive(message)
        await self.tasks.finish()

    async def do(self, op: str, operation: Operation) -> WorkerDone | WorkerFailed:
        await self.tell(Work(RUN, OpId(op), WorkerName("w"), ANN, operation))
        answer: WorkerDone | WorkerFailed = self.said[-1]
        assert (answer.run, answer.op, answer.worker) == (RUN, op, "w")
        return answer

    async def gradient(self, op: str, number: int) -> WorkerDone | WorkerFailed:
        return await self.do(op, ForwardBackward(self.store.put(f"batch-{number}", batch(number)), LOSS))

    async def step(self, op: str, *gradients: str, learner: bytes = b"") -> WorkerDone | WorkerFailed:
        return await self.do(op, OptimStep(ADAM, tuple(map(OpId, gradients)), learner))

    async def published(self, version: int) -> str:
        answer = await self.do(f"publish {version}", Publish(version))
        assert isinstance(answer, WorkerDone) and isinstance(answer.result, Published)
        return answer.result.adapter.digest


@pytest.fixture
def begin(tmp_path: Path) -> Callable[[], Server]:
    """A server on the same directory, with nothing in its memory."""

    def start(**other: Any) -> Server:
        engine = ScriptedEngine()
        engine._open = True
        given = {"commits": DiskCommits(tmp_path / "state"), "store": BundleStore(tmp_path / "spool"), **other}
        return Server(engine, **given)

    return start


async def undisturbed(server: Server) -> list[str]:
    """Attach and two steps; the digests of what is published."""
    await server.do("attach", Attach(LoraSpec()))
    digests = []
    for number in (1, 2):
        await server.gradient(f"g{number}", number)
        await server.step(f"s{number}", f"g{number}")
        digests.append(await server.published(number))
    return digests


async def test_a_step_that_comes_again_after_a_restart_gets_its_first_result(begin: Callable[[], Server]) -> None:
    first = begin()
    await first.do("attach", Attach(LoraSpec()))
    await first.gradient("g1", 1)
    answer = await first.step("s1", "g1")
    published = await first.published(1)
    second = begin()
    assert await second.step("s1", "g1") == answer
    assert await second.published(2) == published  # nothing has moved


async def test_training_goes_on_after_a_restart_as_if_nothing_had_happened(
    begin: Callable[[], Server], tmp_path: Path
) -> None:
    expected = await undisturbed(begin(commits=MemoryCommits(), store=BundleStore(tmp_path / "other")))
    first = begin()
    await first.do("attach", Attach(LoraSpec()))
    await first.gradient("g1", 1)
    await first.step("s1", "g1")
    second = begin()
    digests = [await second.published(1)]
    await second.gradient("g2", 2)
    await second.step("s2", "g2")
    assert [*digests, await second.published(2)] == expected


async def test_a_gradient_that_a_restart_has_lost_is_asked_for_again_and_moves_nothing(
    begin: Callable[[], Server], tmp_path: Path
) -> None:
    expected = await undisturbed(begin(commits=MemoryCommits(), store=BundleStore(tmp_path / "other")))
    first = begin()
    await first.do("attach", Attach(LoraSpec()))
    await first.gradient("g1", 1)
    second = begin()
    failed = await second.step("s1", "g1")
    assert isinstance(failed, WorkerFailed) and failed.lost == Lost.GRADIENT
    assert "needs the gradients of g1, here are none since the last commit" in failed.reason
    await second.gradient("g1 again", 1)
    assert isinstance(await second.step("s1 again", "g1 again"), WorkerDone)
    assert await second.published(1) == expected[0]


async def test_a_gradient_nobody_names_is_not_applied(begin: Callable[[], Server], tmp_path: Path) -> None:
    """The host gave that update up; what it left must not get into the next step."""
    expected = await undisturbed(begin(commits=MemoryCommits(), store=BundleStore(tmp_path / "other")))
    server = begin()
    await server.do("attach", Attach(LoraSpec()))
    await server.gradient("given up", 7)
    await server.gradient("g1", 1)
    failed = await server.step("s1", "g1")
    assert isinstance(failed, WorkerFailed) and failed.lost == Lost.GRADIENT
    await server.gradient("g1 again", 1)
    await server.step("s1 again", "g1 again")
    assert await server.published(1) == expected[0]


async def test_who_was_thought_dead_cannot_commit_any_more(begin: Callable[[], Server], tmp_path: Path) -> None:
    expected = await undisturbed(begin(commits=MemoryCommits(), store=BundleStore(tmp_path / "other")))
    asleep, other = begin(), begin()
    await asleep.do("attach", Attach(LoraSpec()))
    await asleep.gradient("g1", 1)
    await other.gradient("g1 there", 1)  # it has taken over
    late = await asleep.step("s1", "g1")
    assert isinstance(late, WorkerFailed) and late.lost == Lost.GRADIENT
    failed = await other.step("s1 there", "g1 there")  # and was taken over from in turn
    assert isinstance(failed, WorkerFailed) and failed.lost == Lost.GRADIENT
    await other.gradient("g1 once more", 1)
    await other.step("s1 once more", "g1 once more")
    assert await other.published(1) == expected[0]


async def test_what_another_worker_has_committed_is_what_is_published(begin: Callable[[], Server]) -> None:
    """A worker that had the policy before must not publish what it remembers of it."""
    first, second = begin(), begin()
    await first.do("attach", Attach(LoraSpec()))
    await second.gradient("g1", 1)
    await second.step("s1", "g1")
    assert await first.published(1) == await second.published(1)


async def test_an_attach_that_comes_again_after_a_restart_is_published_again(begin: Callable[[], Server]) -> None:
    first = begin()
    answer = await first.do("attach", Attach(LoraSpec()))
    second = begin()
    assert await second.do("attach", Attach(LoraSpec())) == answer
    refused = await second.do("another", Attach(LoraSpec()))
    assert isinstance(refused, WorkerFailed) and "attached already" in refused.reason


async def test_a_rewind_is_committed_too(begin: Callable[[], Server]) -> None:
    first = begin()
    attached = await first.do("attach", Attach(LoraSpec()))
    assert isinstance(attached, WorkerDone) and isinstance(attached.result, Published)
    await first.gradient("g1", 1)
    await first.step("s1", "g1")
    await first.do("rewind", Rewind(attached.result.adapter))
    assert await begin().published(1) == attached.result.adapter.digest


async def test_a_policy_that_nobody_has_committed_is_lost(begin: Callable[[], Server]) -> None:
    for answer in (await begin().gradient("g1", 1), await begin().do("p", Publish(1))):
        assert isinstance(answer, WorkerFailed) and answer.lost == Lost.POLICY


async def test_a_saved_state_is_the_commit_with_what_the_learner_remembers(begin: Callable[[], Server]) -> None:
    first = begin()
    await undisturbed(first)
    saved = await first.do("save", SaveState(b"baselines"))
    assert isinstance(saved, WorkerDone) and isinstance(saved.result, Saved)
    assert first.store.read(saved.result.state)["learner.bin"] == b"baselines"
    published = await first.published(3)
    third = begin(commits=MemoryCommits())
    loaded = await third.do("load", LoadState(saved.result.state, 7))
    assert isinstance(loaded, WorkerDone) and isinstance(loaded.result, Published)
    assert (loaded.result.version.version, loaded.result.adapter.digest) == (7, published)
    again = await third.do("save again", SaveState(b"baselines"))
    assert isinstance(again, WorkerDone) and isinstance(again.result, Saved)
    assert again.result.state.digest == saved.result.state.digest


async def test_the_learners_numbers_are_committed_with_the_step(begin: Callable[[], Server]) -> None:
    first = begin()
    await first.do("attach", Attach(LoraSpec()))
    await first.gradient("g1", 1)
    await first.step("s1", "g1", learner=b"after the step")
    second = begin()
    await second.gradient("g2", 2)  # takes over
    newest = second.commits.read(ANN)
    assert newest is not None and newest.files["learner.bin"] == b"after the step"


async def test_a_run_that_is_over_leaves_no_commits(begin: Callable[[], Server], tmp_path: Path) -> None:
    server = begin()
    await undisturbed(server)
    await server.tell(Release(RUN))
    assert list((tmp_path / "state").iterdir()) == []


class Full(MemoryCommits):
    """A disk that takes nothing until there is room."""

    room = False

    def write(self, policy: PolicyName, number: int, files: Mapping[str, bytes]) -> None:
        if not self.room:
            raise CommitUnwritable("cannot commit: no space left on device")
        super().write(policy, number, files)


async def test_a_full_disk_makes_the_step_wait_until_there_is_room(begin: Callable[[], Server]) -> None:
    commits = Full()
    server = begin(commits=commits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.do, "attach", Attach(LoraSpec()))
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            assert server.said == []
            server.clock.advance(2.0)
        commits.room = True
        await anyio.wait_all_tasks_blocked()
        server.clock.advance(2.0)
    assert isinstance(server.said[-1], WorkerDone)
