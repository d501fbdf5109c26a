"""A whole system in one process: the coordinator daemon, task servers with the scripted engine, and hosts, on one network.

Every message the core hears and says is kept, and its invariants are checked after each step.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from coordinator.app.config import RunConfig, config_text, merged, resolve
from coordinator.app.daemon import Daemon
from coordinator.app.further import Further
from coordinator.app.local import Play, RunRequest
from coordinator.app.progress import RunResult, Silent
from coordinator.app.rundir import Exit, RunDirectory, read_metrics
from coordinator.core.coordinator import Coordinator
from scenarios import Scenario, read_recordings
from tinker.engines.engine import EngineError, GenerateRequest
from tinker.engines.scripted import ScriptedEngine
from tinker.models import DEMO
from tinker.protocol.batches import Row
from tinker.protocol.episodes import Recording
from tinker.protocol.to_coordinator import Hello
from tinker.protocol.values import LoraSpec, LossSpec, ModelCard, PeerName, PolicyName, RunId
from tinker.runtime.bulk import BULK_LIMITS, BulkClient, BulkServer, BundleStore
from tinker.runtime.clock import Clock, MonotonicClock
from tinker.runtime.transport import MemoryNetwork, Transport, ZmqTransport
from tinker.server.taskserver import DEFAULT_POOLS, Pool, TaskServer
from tinker.tokens import Tokenizer, check_model_dir

TOKENIZER = Tokenizer.from_dir(DEMO)
FACTS = check_model_dir(DEMO)
EOS = TOKENIZER.eos_ids[0]
CARD = ModelCard(
    FACTS.name, "scripted", TOKENIZER.digest, FACTS.vocab, FACTS.context, TOKENIZER.eos_ids, LoraSpec().targets
)

Reply = Callable[[GenerateRequest], list[int]]


def said(text: str) -> list[int]:
    """A reply as the model would give it: the text's tokens and the end-of-sequence token."""
    return [*TOKENIZER.encode(text), EOS]


class Core(Coordinator):
    """The core, with what it heard and said, and every broken invariant."""

    def __init__(self, lease: float) -> None:
        super().__init__(PeerName("coordinator"), lease=lease)
        self.log: list[Any] = []
        self.broken: list[str] = []

    def join(self, hello: Hello, now: float) -> Any:
        self.log.append(hello)
        return self._seen(super().join(hello, now))

    def step(self, peer: PeerName, message: Any, now: float) -> Any:
        self.log.append(message)
        return self._seen(super().step(peer, message, now))

    def tick(self, now: float) -> Any:
        return self._seen(super().tick(now))

    def _seen(self, sends: Any) -> Any:
        self.log += [message for _, message in sends]
        self.broken += self.violations()
        return sends

    def of(self, *kinds: type[Any]) -> list[Any]:
        """Every message of these kinds, heard or said, in order."""
        return [message for message in self.log if isinstance(message, kinds)]


class Keeping(ScriptedEngine):
    """The scripted engine, keeping what it is asked. Answers after a random number of turns of the event loop if `shuffled`."""

    def __init__(self, replies: Reply | Sequence[str], shuffled: bool = False) -> None:
        self.requests: list[GenerateRequest] = []
        self.batches: list[tuple[PolicyName, list[Row]]] = []
        self.gate: anyio.Event | None = None  # nothing is answered before
        self.refuse: Callable[[PolicyName, int], bool] = lambda policy, batch: False
        texts = [] if callable(replies) else [said(text) for text in replies]
        delays = random.Random(0)

        def reply(request: GenerateRequest) -> list[int]:
            self.requests.append(request)
            if callable(replies):
                return replies(request)
            return texts[random.Random(request.sampling.seed).randrange(len(texts))]

        async def dawdle(_: float) -> None:
            if self.gate is not None:
                await self.gate.wait()
            for _ in range(delays.randrange(20)):
                await checkpoint()

        super().__init__(CARD, reply, latency=1.0 if shuffled else 0.0, sleep=dawdle)

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        self.batches.append((policy, list(rows)))
        if self.refuse(policy, len(self.batches)):
            raise EngineError(f"the gradient of {policy} is not finite: lower the learning rate")
        return await super().forward_backward(policy, rows, loss)


class Notes(Silent):
    """What the user would have read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.results: list[RunResult] = []
        self.on_playing: Callable[[int, int], None] = lambda done, total: None

    def playing(self, done: int, total: int) -> None:
        self.on_playing(done, total)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, result: RunResult) -> None:
        self.results.append(result)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until it is so; an assertion fails if it does not become so."""
    with anyio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 (nobody tells us)
            await anyio.sleep(0.001)
    assert condition()


@dataclass(slots=True)
class Ran:
    """What a run left."""

    exit: Exit
    path: Path
    notes: list[str]
    config: RunConfig
    result: RunResult

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def trained(self, agent: str = "") -> list[dict[str, Any]]:
        return [row for row in self.rows if row["phase"] == "train" and agent in ("", row["agent"])]

    def recordings(self) -> list[Recording]:
        files = sorted((self.path / "recordings").glob("*.jsonl"))
        return [recording for file in files for recording in read_recordings(file)]


@dataclass(slots=True)
class Helping:
    """A further host. `kill` ends it as a crash would: no good-bye."""

    further: Further
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)
    exit: Exit | None = None

    async def kill(self) -> None:
        self.scope.cancel()
        await self.over.wait()


@dataclass(slots=True)
class World:
    """`engines`: one for each task server, in order of joining."""

    transport: Transport
    address: str
    core: Core
    daemon: Daemon
    place: Path
    tasks: TaskGroup
    scheme: str
    clock: Clock = field(default_factory=MonotonicClock)
    engines: list[Keeping] = field(default_factory=list)
    servers: list[TaskServer] = field(default_factory=list)
    _scopes: list[anyio.CancelScope] = field(default_factory=list)

    async def serve(
        self, engine: Keeping | Sequence[str], *, name: str = "server", pools: tuple[Pool, ...] = DEFAULT_POOLS
    ) -> Keeping:
        """Start a task server; returns its engine when it has joined."""
        chosen = engine if isinstance(engine, Keeping) else Keeping(engine)
        joined = anyio.Event()
        data = self.transport.listen(self._data_address(name), BULK_LIMITS)
        store = BundleStore(self.place / f"spool-{name}", data.address)
        connect = partial(self.transport.connect, limits=BULK_LIMITS)
        bulk, loop = BulkClient(connect, machine=store.machine), self.transport.connect(self.address)
        server = TaskServer(
            PeerName(name),
            chosen,
            TOKENIZER.bundle(),
            loop,
            store,
            BulkServer(store, data),
            bulk,
            self.clock,
            1,
            pools,
            joined.set,
        )
        self.engines.append(chosen)
        self.servers.append(server)
        scope = anyio.CancelScope()
        self._scopes.append(scope)

        async def run() -> None:
            with scope:
                async with chosen:
                    await server.serve()
            with anyio.CancelScope(shield=True):
                await loop.aclose()
                await data.aclose()

        self.tasks.start_soon(run, name=f"task server {name}")
        await joined.wait()
        return chosen

    def stop(self, number: int = 0) -> None:
        """End a task server as a crash would: no good-bye."""
        self._scopes[number].cancel()

    async def run(
        self,
        scenario: Scenario,
        *,
        name: str = "run",
        machine: str = "",
        watcher: Notes | None = None,
        model: str = "",
        pages: bool = False,
        **given: Any,
    ) -> Ran:
        """Play one run with small defaults; `given` are configuration keys."""
        small = {"rounds": 2, "groups": 2, "group_size": 2, "evaluate_every": 0, "engine": "scripted"}
        config = resolve(scenario.defaults, merged(small, given), {"scenario": scenario.name})
        directory = RunDirectory.create(self.place / name, scenario.name, config_text(config))
        progress = watcher or Notes()
        request = RunRequest(config, scenario, directory, self.address, model)
        play = Play(request, progress, self.clock, self.transport, name=f"host-{name}")
        play.machine = machine or play.machine
        if not pages:
            play.draw = lambda rows, headline: None
        exit = await play.run()
        return Ran(exit, directory.path, progress.notes, config, progress.results[0])

    def help(
        self, scenario: Scenario, run: str, *, name: str = "ann", capacity: int = 4, grace: float = 10.0
    ) -> Helping:
        """Start a further host of this run (its id)."""
        further = Further(
            RunId(run), scenario, self.address, capacity, name, grace, self.clock, self.transport, machine=f"of {name}"
        )
        helping = Helping(further)

        async def serve() -> None:
            with helping.scope:
                helping.exit = await further.serve()
            helping.over.set()

        self.tasks.start_soon(serve, name=f"further host {name}")
        return helping

    async def begun(self, name: str = "run") -> str:
        """Wait until the run of `run(name=name)` is admitted; returns its id."""
        await until(lambda: any(run.startswith(f"{name}-") for run in self.core.runs))
        return next(run for run in self.core.runs if run.startswith(f"{name}-"))

    def _data_address(self, name: str) -> str:
        return "tcp://127.0.0.1:0" if self.scheme == "zmq" else f"data-{name}"


@asynccontextmanager
async def world(place: Path, scheme: str = "memory", lease: float = 15.0) -> AsyncIterator[World]:
    """A coordinator alone; task servers and runs come by `serve` and `run`. On exit no invariant may ever have been broken."""
    transport: Transport = ZmqTransport() if scheme == "zmq" else MemoryNetwork()
    listener = transport.listen("tcp://127.0.0.1:0" if scheme == "zmq" else "coordinator")
    core = Core(lease)
    daemon = Daemon(core, listener, MonotonicClock())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.serve, name="daemon")
        made = World(transport, listener.address, core, daemon, place, tasks, scheme)
        try:
            yield made
        finally:
            for number in range(len(made.servers)):
                made.stop(number)
            daemon.stop()
    assert core.broken == []
