"""A task server that drains: it finishes what it has begun, begins nothing more, and says good-bye."""

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
from tinker.protocol.to_coordinator import Bye, Generated, Heartbeat, Hello
from tinker.protocol.to_taskserver import Cancel, Generate, ToTaskserver
from tinker.protocol.values import (
    BASE,
    EpisodeId,
    PeerName,
    Phase,
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
from tinker.server.taskserver import TaskServer

WORKER = WorkerName("server/rollout-0")


def request(number: int) -> Generate:
    turn = TurnId(RunId("run"), EpisodeId(1, Phase.ROLLOUT, number), 0)
    return Generate(turn, SeatName("ann"), WORKER, BASE, pack_ids([1, 2, 3]), Sampling(4), 60.0)


@dataclass(slots=True)
class Desk:
    """The coordinator's end of one task server, whose engine answers when `open` is set."""

    server: TaskServer
    clock: ManualClock
    listener: Listener
    open: anyio.Event
    asked: list[float]
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

    async def begins(self, *messages: Generate) -> None:
        """Send requests and wait until the engine has them."""
        wanted = len(self.asked) + len(messages)
        for message in messages:
            self.says(message)
        while len(self.asked) < wanted:
            await checkpoint()


@asynccontextmanager
async def desk(place: Path) -> AsyncIterator[Desk]:
    network, clock, opened = MemoryNetwork(), ManualClock(), anyio.Event()
    asked: list[float] = []

    async def wait(seconds: float) -> None:
        asked.append(seconds)
        await opened.wait()

    engine = ScriptedEngine(latency=1.0, sleep=wait)
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
    )
    made = Desk(server, clock, listener, opened, asked)

    async def serve() -> None:
        async with engine:
            await server.serve()
        await server.leave("it was told to stop")
        made.over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, name="task server")
        assert isinstance(await made.hears(), Hello)
        made.says(Welcome(PeerName("coordinator"), 1, 3600.0))
        yield made
        tasks.cancel_scope.cancel()
    await data.aclose()
    await listener.aclose()


async def let_it_look(here: Desk) -> None:
    """Let the draining server look whether it is finished."""
    await anyio.wait_all_tasks_blocked()
    here.clock.advance(0.1)
    await anyio.wait_all_tasks_blocked()


async def test_with_nothing_to_do_it_leaves_at_once(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        here.server.drain()
        assert await here.hears() == Bye("it was told to stop")
        await here.over.wait()


async def test_it_answers_what_it_has_begun_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        await here.begins(request(0), request(1))
        here.server.drain()
        await let_it_look(here)
        here.says(request(2))
        await let_it_look(here)
        here.open.set()
        answers = [await here.hears(), await here.hears()]
        assert {each.turn.episode.index for each in answers if isinstance(each, Generated)} == {0, 1}
        await let_it_look(here)
        assert await here.hears() == Bye("it was told to stop")
        assert len(here.asked) == 2


async def test_what_is_cancelled_is_waited_for_no_longer(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        await here.begins(request(0))
        here.server.drain()
        asked = request(0)
        here.says(Cancel(asked.turn, asked.seat, WORKER))
        await let_it_look(here)
        assert await here.hears() == Bye("it was told to stop")


async def test_the_grace_time_ends_what_does_not_end(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        await here.begins(request(0))
        here.server.drain()
        await let_it_look(here)
        assert not here.over.is_set()
        here.clock.advance(here.server.grace)
        assert await here.hears() == Bye("it was told to stop")
