"""A task server with its coordinator's end in our hand, and an engine that answers when we say so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from anyio.lowlevel import checkpoint

from tinker.engines.scripted import ScriptedEngine
from tinker.protocol import ToCoordinator
from tinker.protocol.to_any import Welcome
from tinker.protocol.to_coordinator import Heartbeat, Hello
from tinker.protocol.to_taskserver import Forget, Generate, ToTaskserver
from tinker.protocol.values import (
    BASE,
    EpisodeId,
    PeerName,
    Phase,
    PoolKind,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
    pack_ids,
)
from tinker.runtime.bulk import BulkClient, BulkServer, BundleStore
from tinker.runtime.clock import ManualClock
from tinker.runtime.codec import decode, encode
from tinker.runtime.transport import Disconnected, Listener, MemoryNetwork, PeerKey
from tinker.server.taskserver import DEFAULT_POOLS, Pool, TaskServer

WORKER = WorkerName("server/rollout-0")


def request(number: int) -> Generate:
    turn = TurnId(RunId("run"), EpisodeId(1, Phase.ROLLOUT, number), 0)
    return Generate(turn, SeatName("ann"), WORKER, BASE, pack_ids([1, 2, 3]), Sampling(4), 60.0)


class Breaking(ScriptedEngine):
    """Breaks whoever lets it forget an episode, while `broken`."""

    broken = False

    async def forget(self, cache_key_prefix: str) -> None:
        if self.broken:
            raise RuntimeError("it was told to break")


@dataclass(slots=True)
class Desk:
    """The coordinator's end of one task server, whose engine answers when `open` is set."""

    server: TaskServer
    clock: ManualClock
    listener: Listener
    open: anyio.Event
    asked: list[float]
    engine: Breaking
    over: anyio.Event = field(default_factory=anyio.Event)
    key: PeerKey = field(default_factory=lambda: PeerKey(b""))

    async def hears(self) -> ToCoordinator:
        """The next message that is no heartbeat."""
        while True:
            arrival = await self.listener.receive()
            assert not isinstance(arrival, Disconnected)
            self.key, data = arrival
            message: ToCoordinator = decode(data, ToCoordinator)
            if not isinstance(message, Heartbeat):
                return message

    def says(self, message: ToTaskserver | Welcome) -> None:
        self.listener.send(self.key, encode(message))

    def welcomes(self) -> None:
        self.says(Welcome(PeerName("coordinator"), 1, 3600.0))

    async def breaks_a_worker(self) -> None:
        """The rollout worker fails, and time passes in which it is built again, if it is."""
        self.engine.broken = True
        self.says(Forget(RunId("run"), EpisodeId(1, Phase.ROLLOUT, 0)))
        await anyio.wait_all_tasks_blocked()
        self.engine.broken = False
        self.clock.advance(5.0)
        await anyio.wait_all_tasks_blocked()

    async def begins(self, *messages: Generate) -> None:
        """Send requests and wait until the engine has them."""
        wanted = len(self.asked) + len(messages)
        for message in messages:
            self.says(message)
        while len(self.asked) < wanted:
            await checkpoint()


@asynccontextmanager
async def desk(place: Path, capacity: int = 256) -> AsyncIterator[Desk]:
    network, clock, opened = MemoryNetwork(), ManualClock(), anyio.Event()
    asked: list[float] = []

    async def wait(seconds: float) -> None:
        asked.append(seconds)
        await opened.wait()

    engine = Breaking(latency=1.0, sleep=wait)
    listener, data = network.listen("coordinator"), network.listen("data")
    store, connection = BundleStore(place), network.connect("coordinator")
    server = TaskServer(
        PeerName("server"),
        engine,
        b"",
        connection,
        store,
        BulkServer(store, data),
        BulkClient(partial(network.connect)),
        clock,
        1,
        (Pool(PoolKind.ROLLOUT, 1, capacity), *DEFAULT_POOLS[1:]),
    )
    made = Desk(server, clock, listener, opened, asked, engine)

    async def serve() -> None:
        async with engine:
            await server.serve()
        await server.leave("it was told to stop")
        made.over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, name="task server")
        assert isinstance(await made.hears(), Hello)
        made.welcomes()
        yield made
        tasks.cancel_scope.cancel()
    await data.aclose()
    await listener.aclose()
