"""What runs inside the two daemon processes: `coordinator` and `taskserver`.

Each prints one JSON line with its address on stdout when it is ready, logs to stderr, stops on SIGTERM or SIGINT (a second one ends it at
once), and leaves when the process that started it is gone (`parent`), so that nothing is ever left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import structlog

from coordinator.app.access import Access, Keys, check_listen, check_loopback, follow_file
from coordinator.app.arrays import Arrays
from coordinator.app.config import ConfigError
from coordinator.app.daemon import DRAIN, Daemon
from coordinator.app.deaths import Deaths
from coordinator.app.journal import Recorder, open_journal
from coordinator.app.rollout import RolloutConfig
from coordinator.app.rundir import Exit
from coordinator.core.coordinator import Coordinator
from scenarios import Scenario
from tinker.engines.engine import Engine
from tinker.engines.scripted import ScriptedEngine
from tinker.pools.commits import DiskCommits, MemoryCommits
from tinker.protocol.values import LoraSpec, ModelCard, PeerName, Role, RunId
from tinker.runtime.bulk import BULK_LIMITS, BulkClient, BulkServer, BundleStore, machine_id
from tinker.runtime.clock import MonotonicClock
from tinker.runtime.transport import Listener, ZmqTransport
from tinker.server.taskserver import DEFAULT_POOLS, Pool, TaskServer
from tinker.tokens import Tokenizer, check_model_dir

PARENT_POLL = 0.5  # seconds between looks whether our parent still lives
LOOPBACK = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """`http`: HOST:PORT of the health, metrics and status pages ("": none). `grace`: seconds to drain.
    `keys`: its own, and whom it lets in. `journal`: its directory (None: what it knows ends with it). `lease`: as the core's.
    `segments`: of the journal that stay (0: all)."""

    bind: str
    name: str
    parent: int = 0
    http: str = ""
    grace: float = DRAIN
    keys: Keys = Keys()
    journal: Path | None = None
    lease: float = 15.0
    segments: int = 0


@dataclass(frozen=True, slots=True)
class TaskServerSettings:
    """`model`: a directory. `engine`: "torch" or "scripted"; `rollout`: what answers, if not that. `threads`: of the engine; 0: all cores.
    `http`: HOST:PORT of the health and metrics pages ("": none). `replies`: what the scripted engine answers with. `spool`: where bundles
    lie. `state`: where update workers commit (None: it ends with the process). `grace`: seconds to finish what has begun when told to stop.
    `keys`: its own, the coordinator's, and whose bundles it serves. `data`: where its data connection listens, as others reach it.
    `device`, `dtype`: of the torch engine. `deterministic`: the same bits whatever arrives when."""

    coordinator: str
    name: str
    model: Path
    engine: str = "torch"
    rollout: RolloutConfig = RolloutConfig()
    threads: int = 0
    replies: tuple[str, ...] = ("yes", "no")
    spool: Path | None = None
    state: Path | None = None
    pools: tuple[Pool, ...] = DEFAULT_POOLS
    parent: int = 0
    grace: float = DRAIN
    keys: Keys = Keys()
    data: str = LOOPBACK
    device: str = "auto"
    dtype: str = "auto"
    deterministic: bool = False
    http: str = ""


async def run_coordinator(settings: CoordinatorSettings) -> None:
    """Serve until told to stop, then drain. UnsafeAddress, AddressInUse or JournalError before anything is done."""
    keys = settings.keys
    check_listen(settings.bind, keys)
    async with AsyncExitStack() as stack:
        listening = None
        if settings.http:
            from coordinator.web.pages import bound  # only who wants it waits for it
            from coordinator.web.server import serving

            check_loopback(settings.http)
            listening = stack.enter_context(bound(settings.http))
        recorder, arrays = _recorder(settings, stack)
        listener = ZmqTransport(keys.security()).listen(settings.bind)
        access = Access(listener, keys.authorized)
        daemon = Daemon(
            recorder.core,
            listener,
            MonotonicClock(),
            grace=settings.grace,
            access=access,
            recorder=recorder,
            arrays=arrays,
            deaths=Deaths(machine_id()),
        )
        pages = {"http": await stack.enter_async_context(serving(daemon, listening))} if listening else {}
        _ready(listener.address, **pages)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_told, settings.parent, daemon.stop, name="signals")
            if keys.authorized is not None:
                tasks.start_soon(follow_file, keys.authorized, MonotonicClock(), listener, name="authorized keys")
            await daemon.serve()
            tasks.cancel_scope.cancel()


def _recorder(settings: CoordinatorSettings, stack: AsyncExitStack) -> tuple[Recorder, Arrays]:
    """The core, where its journal has left it."""
    core = Coordinator(PeerName(settings.name), lease=settings.lease)
    if settings.journal is None:
        return Recorder(core), Arrays()
    recorder = open_journal(settings.journal, core, MonotonicClock().now(), settings.segments)
    assert recorder.journal is not None
    stack.callback(recorder.journal.close)
    log = structlog.get_logger("coordinator")
    if recorder.journal.repaired:
        log.warning("journal repaired", what=recorder.journal.repaired)
    log.info(
        "journal", directory=str(settings.journal), epoch=core.epoch, runs=len(core.runs), away=len(core.roster.away)
    )
    return recorder, Arrays(settings.journal)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Of a further host. `grace`: seconds to play what is in hand when told to leave. `keys`: its own, and the coordinator's."""

    coordinator: str
    run: str
    scenario: Scenario
    name: str
    capacity: int
    parent: int = 0
    grace: float = DRAIN
    keys: Keys = Keys()


async def run_host(settings: HostSettings) -> Exit:
    """Play for the run until it is over, or until told to stop."""
    from coordinator.app.further import Further

    structlog.contextvars.bind_contextvars(member=settings.name)
    further = Further(
        RunId(settings.run),
        settings.scenario,
        settings.coordinator,
        settings.capacity,
        settings.name,
        settings.grace,
        transport=ZmqTransport(settings.keys.security()),
        on_enlisted=lambda: _ready(settings.coordinator, run=settings.run),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_until_told, settings.parent, further.leave, name="signals")
        exit = await further.serve()
        tasks.cancel_scope.cancel()
    return exit


async def run_taskserver(settings: TaskServerSettings) -> None:
    """Load the model, join the coordinator, serve until told to stop. A spool of its own goes with it; so does that of a parent that
    is gone."""
    spool = settings.spool or Path(tempfile.mkdtemp(prefix="opentinker-spool-"))

    def forget() -> None:
        if settings.spool is None or (settings.parent and os.getppid() != settings.parent):
            shutil.rmtree(spool, ignore_errors=True)

    structlog.contextvars.bind_contextvars(member=settings.name)
    try:
        async with anyio.create_task_group() as tasks:
            stop = _Stop(tasks.cancel_scope)
            tasks.start_soon(_until_told, settings.parent, stop, forget, name="signals")
            async with _pages(settings.http, stop) as pages:
                await _serve_taskserver(settings, spool, stop, pages)
            tasks.cancel_scope.cancel()
    finally:
        forget()


@dataclass(slots=True)
class _Stop:
    """What the first signal does to a task server: cut its start short, or drain it."""

    starting: anyio.CancelScope
    server: TaskServer | None = None

    def __call__(self) -> None:
        if self.server is None:
            self.starting.cancel()
        else:
            self.server.drain()


@asynccontextmanager
async def _pages(http: str, stop: _Stop) -> AsyncIterator[dict[str, str]]:
    """The pages of a task server, from before its model is loaded until it has left; gives what the ready line says of them."""
    if not http:
        yield {}
        return
    from coordinator.web.pages import bound, served  # only who wants it waits for it
    from coordinator.web.taskserver import application

    check_loopback(http)
    with bound(http) as listening:
        async with served(application(lambda: stop.server.status() if stop.server else None), listening) as url:
            structlog.get_logger("taskserver").info("pages", http=url)
            yield {"http": url}


async def _serve_taskserver(settings: TaskServerSettings, spool: Path, stop: _Stop, pages: dict[str, str]) -> None:
    tokenizer = Tokenizer.from_dir(settings.model)
    keys = settings.keys
    check_listen(settings.data, keys)
    transport = ZmqTransport(keys.security(Role.HOST, Role.TASKSERVER))
    coordinator = keys.to(settings.coordinator)
    async with make_engine(settings, tokenizer, spool) as engine:
        data_listener = transport.listen(settings.data, BULK_LIMITS)
        store = BundleStore(spool, endpoint=data_listener.address)
        server = TaskServer(
            PeerName(settings.name),
            engine,
            tokenizer.bundle(),
            transport.connect(coordinator),
            store,
            BulkServer(store, data_listener),
            BulkClient(partial(transport.connect, limits=BULK_LIMITS)),
            MonotonicClock(),
            os.getpid(),
            settings.pools,
            on_joined=_once(lambda: _ready(settings.coordinator, **pages)),
            grace=settings.grace,
            commits=DiskCommits(settings.state) if settings.state else MemoryCommits(),
        )
        stop.server = server
        try:
            await _serving(server, keys, data_listener)
        finally:
            with anyio.CancelScope(shield=True):
                await server.leave("it was told to stop")
                await data_listener.aclose()


async def _serving(server: TaskServer, keys: Keys, data: Listener) -> None:
    """Until the server ends; meanwhile the data connection's keys are those of the file."""
    async with anyio.create_task_group() as tasks:
        if keys.authorized is not None:
            tasks.start_soon(follow_file, keys.authorized, MonotonicClock(), data, name="authorized keys")
        await server.serve()
        tasks.cancel_scope.cancel()


def pools_named(words: Sequence[str]) -> tuple[Pool, ...]:
    """Pools from words like `rollout:64` or `update`; none: the default ones. ConfigError names what is wrong."""
    known = {str(pool.kind): pool for pool in DEFAULT_POOLS}
    chosen: dict[str, Pool] = {}
    for word in words:
        kind, _, capacity = word.partition(":")
        if kind not in known or kind in chosen:
            raise ConfigError(
                f"--pool {word!r}: expected {', '.join(known)}, each once, with a capacity if you like: rollout:64"
            )
        if capacity and not (capacity.isdecimal() and int(capacity)):
            raise ConfigError(f"--pool {word!r}: the capacity is how many requests a worker serves at once, at least 1")
        chosen[kind] = replace(known[kind], capacity=int(capacity)) if capacity else known[kind]
    return tuple(chosen.values()) or DEFAULT_POOLS


def make_engine(settings: TaskServerSettings, tokenizer: Tokenizer, spool: Path) -> Engine:
    """The engine that trains, and the servers that answer, if that is not the same."""
    training = _training_engine(settings, tokenizer)
    if not settings.rollout.engine:
        return training
    from tinker.engines.sglang import SglangEngine

    return SglangEngine(settings.rollout.servers(), training, model=settings.model, spool=spool)


def _training_engine(settings: TaskServerSettings, tokenizer: Tokenizer) -> Engine:
    """The engine by name. Importing torch happens here and nowhere earlier."""
    if settings.engine == "scripted":
        facts = check_model_dir(settings.model)
        sizes = (facts.vocab, facts.context, tokenizer.eos_ids)
        card = ModelCard(facts.name, "scripted", tokenizer.digest, *sizes, LoraSpec().targets)
        return ScriptedEngine(card, [(*tokenizer.encode(reply), *tokenizer.eos_ids[:1]) for reply in settings.replies])
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # libgomp reads it once, when torch is imported
    from tinker.engines.torch import TorchEngine

    threads = settings.threads or os.cpu_count() or 1
    return TorchEngine(
        str(settings.model),
        threads=threads,
        device=settings.device,
        dtype=settings.dtype,
        deterministic=settings.deterministic,
    )


async def _until_told(parent: int, stop: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> None:
    """`stop` at the first signal, or when the parent is gone; `at_once` and out at the second."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_parent, parent, stop, name="watch parent")
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            told = 0
            async for number in signals:
                told += 1
                if told > 1:
                    at_once()
                    os._exit(128 + number)
                stop()


async def _watch_parent(parent: int, stop: Callable[[], None]) -> None:
    while parent and os.getppid() == parent:  # noqa: ASYNC110 (nobody tells us)
        await anyio.sleep(PARENT_POLL)
    if parent:
        structlog.get_logger().warning("parent is gone, leaving", parent=parent)
        stop()


def _ready(address: str, **more: str) -> None:
    print(json.dumps({"ready": address, **more}), flush=True)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    calls = [call]
    return lambda: calls.pop()() if calls else None
