"""The SGLang engine: the rollout half is SGLang servers, the update and forward halves are another engine, which has its own copy of the
base model. What the one publishes the other serves.

Seeds: SGLang samples from its own generator on this kind of device, so `Sampling.seed` is not honoured and answers of two runs differ.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np

from tinker.engines.checks import CLOSED, check_request
from tinker.engines.engine import Engine, EngineError, Files, GenerateRequest, Generation
from tinker.engines.sglang.api import Asked
from tinker.engines.sglang.fleet import Fleet
from tinker.engines.sglang.keeper import Keeper, Process
from tinker.engines.sglang.launch import LaunchedServer, check_launch
from tinker.engines.sglang.registry import Registry
from tinker.engines.sglang.replica import Replica
from tinker.engines.sglang.serving import Serving
from tinker.engines.sglang.settings import Servers
from tinker.engines.sglang.trained import TrainedElsewhere
from tinker.protocol.batches import Row
from tinker.protocol.values import BASE, Finish, ModelCard, PolicyVersion

PROBE = 24  # ids by which a server's model is told from another


class SglangEngine(TrainedElsewhere):
    """See `tinker.engines.engine.Engine`. `training` trains and scores; it is entered and left with this one. `model`: the base model's
    directory, for servers of our own. `probe`: compare every server's model with the training engine's. `spool`: where adapters lie."""

    name = "sglang"

    def __init__(
        self, servers: Servers, training: Engine, *, model: Path = Path(), probe: bool = True, spool: Path | None = None
    ) -> None:
        if bool(servers.urls) == (servers.launch is not None):
            raise EngineError("the SGLang engine needs either the addresses of running servers or how to launch some")
        if servers.launch is not None:
            check_launch(servers.launch)
        super().__init__(training)
        self._servers = servers
        self._model = model
        self._probed = probe
        self._place = spool
        self._open = False
        self._scored: dict[PolicyVersion, None] = {}
        self._running = 0
        self._began = 0.0
        self._busy = 0.0

    @property
    def card(self) -> ModelCard:
        """The training engine's, with as much context as the servers have, too."""
        context = [each.facts.context for each in self._registry.fleet.replicas if each.facts is not None]
        card = self._training.card
        return replace(card, context=min([card.context, *context]))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """What is known of each server."""
        return self._registry.fleet.replicas

    @property
    def busy_seconds(self) -> float:
        now = anyio.current_time() - self._began if self._running else 0.0
        return self._busy + now + self._training.busy_seconds

    async def __aenter__(self) -> SglangEngine:
        """EngineError unless every server came up."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._training)
            spool = Path(tempfile.mkdtemp(prefix="sglang-", dir=self._place))
            stack.callback(shutil.rmtree, spool, ignore_errors=True)
            keepers = await self._keepers(spool)
            for keeper in keepers:
                stack.push_async_callback(keeper.close)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            for keeper in keepers:
                tasks.start_soon(keeper.keep, name=f"keep replica {keeper.replica.number}")
            for keeper in keepers:
                await keeper.settled.wait()
            failed = [f"{keeper.replica.name}: {keeper.failure}" for keeper in keepers if keeper.failure]
            if not failed:
                self._serving = Serving(self._registry, tasks)
                self._stack = stack.pop_all()
                self._open = True
                return self
        raise EngineError(f"not every SGLang server came up: {'; '.join(failed)}")

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        await self._serving.close()
        await self._stack.aclose()

    async def _keepers(self, spool: Path) -> list[Keeper]:
        servers, launch = self._servers, self._servers.launch
        count = len(servers.urls) or (launch.replicas if launch else 0)
        replicas = [Replica(number) for number in range(count)]
        label = f"base-{self._training.card.digest[:12] or self._training.card.name}"
        self._registry = Registry(Fleet(replicas), servers, spool, label)
        probe = await self._probe() if self._probed else None
        keepers = []
        for replica in replicas:
            process: Process | None = None
            if launch is not None:
                process = LaunchedServer(launch, self._model, replica.number, spool / f"server-{replica.number}.log")
            keepers.append(
                Keeper(
                    self._registry,
                    replica,
                    url="" if launch else servers.urls[replica.number],
                    process=process,
                    ready=launch.ready if launch else servers.join,
                    restarts=launch.restarts if launch else 0,
                    probe=probe,
                )
            )
        return keepers

    async def _probe(self) -> tuple[Sequence[int], Sequence[float]]:
        """Some ids, and the logprob of all but the first."""
        vocab = self._training.card.vocab
        ids = [7 * place % vocab for place in range(1, PROBE + 1)]
        none = np.zeros(PROBE, np.float32)
        row = Row(np.array(ids, np.int32), np.zeros(PROBE, np.bool_), none, none, none)
        return ids, (await self._training.score(BASE, [row]))[0][1:]

    # --- rollout ---

    async def load(self, version: PolicyVersion, adapter: Files) -> None:
        self._check_open()
        await self._serving.load(version, adapter)

    async def unload(self, version: PolicyVersion) -> None:
        self._check_open()
        self._serving.unload(version)
        if version in self._scored:
            del self._scored[version]
            await self._training.unload(version)

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check_open()
        self._registry.find(request.policy)
        card, sampling = self.card, request.sampling
        check_request(request, card)
        room = card.context - len(request.prompt)
        if room <= 0:
            return Generation([], [], Finish.CONTEXT, request.policy)
        budget = min(room, sampling.max_tokens)
        stops = frozenset((*card.eos_ids, *sampling.stop_ids))
        asked = Asked("", request.prompt, "", "", budget, sampling.temperature, stops, card.vocab)
        self._begin()
        try:
            answer = await self._serving.answer(request.policy, request.cache_key, asked)
        finally:
            self._end()
        limit = Finish.LENGTH if sampling.max_tokens <= room else Finish.CONTEXT
        finish = Finish.STOP if answer.stopped else limit
        return Generation(answer.ids, answer.logprobs, finish, request.policy, answer.seconds)

    async def forget(self, cache_key_prefix: str) -> None:
        """Servers drop what is not used by themselves; we forget which of them had it."""
        self._check_open()
        self._registry.fleet.forget(cache_key_prefix)

    # --- forward ---

    async def score(self, under: PolicyVersion, rows: Sequence[Row]) -> list[list[float]]:
        self._check_open()
        held = self._registry.find(under)
        if under != BASE and under not in self._scored:
            files = {path.name: path.read_bytes() for path in held.directory.iterdir()}
            await self._training.load(under, files)
            self._scored[under] = None
        return await self._training.score(under, rows)

    # --- inside ---

    def _begin(self) -> None:
        if not self._running:
            self._began = anyio.current_time()
        self._running += 1

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._busy += anyio.current_time() - self._began

    def _check_open(self) -> None:
        if not self._open:
            raise EngineError(CLOSED)
