"""The coordinator daemon on a clock that stands still: what it does when it was late, and with peers that do not read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.lowlevel import checkpoint

from coordinator.app.daemon import TICK, Daemon
from coordinator.core.coordinator import Coordinator
from tinker.protocol import ToAny
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import Heartbeat, Hello, ToCoordinator
from tinker.protocol.values import PeerName, Role
from tinker.runtime.clock import ManualClock
from tinker.runtime.codec import decode, encode
from tinker.runtime.transport import Connection, Limits, MemoryNetwork

ANN, BOB = (Hello(Role.HOST, PeerName(name), "here", number) for number, name in enumerate(("ann", "bob"), 1))


@dataclass(slots=True)
class Site:
    daemon: Daemon
    clock: ManualClock
    network: MemoryNetwork
    limits: Limits

    async def says(self, message: ToCoordinator, by: Connection | None = None) -> Connection:
        connection = by or self.network.connect("coordinator", self.limits)
        wanted = self.daemon.messages + 1
        connection.send(encode(message))
        while self.daemon.messages < wanted:
            await checkpoint()
        await anyio.wait_all_tasks_blocked()
        return connection

    async def passes(self, seconds: float) -> None:
        """Time passes, and the daemon looks whenever it wants to."""
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.clock.advance(TICK)
            await anyio.wait_all_tasks_blocked()

    @property
    def members(self) -> set[str]:
        return set(self.daemon.core.roster.peers)


@asynccontextmanager
async def site(limits: Limits = Limits()) -> AsyncIterator[Site]:  # noqa: B008 (it is frozen)
    network, clock = MemoryNetwork(), ManualClock(100.0)
    daemon = Daemon(Coordinator(PeerName("coordinator")), network.listen("coordinator", limits), clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.serve, name="daemon")
        yield Site(daemon, clock, network, limits)
        tasks.cancel_scope.cancel()


async def test_a_coordinator_that_was_stopped_hears_everybody_before_it_gives_anybody_up() -> None:
    """Case 38: two minutes at once, as after a long pause; ann has something to say, bob is silent."""
    async with site() as here:
        ann = await here.says(ANN)
        await here.says(BOB)
        here.clock.advance(120.0)
        await anyio.wait_all_tasks_blocked()
        assert here.members == {"ann", "bob"}
        await here.says(Heartbeat(), by=ann)
        await here.passes(here.daemon.core.lease + 1.0)
        assert here.members == {"ann"}


async def test_a_peer_that_does_not_read_is_cut_off_and_is_told_everything_when_it_is_back() -> None:
    """Cases 24 and 25. The others hear what they are told."""
    async with site(Limits(queue=5)) as here:
        slow, ann = await here.says(ANN), await here.says(BOB)
        for _ in range(5):
            await here.says(Heartbeat(), by=slow)
        peer = here.daemon.core.roster.peers[PeerName("ann")]
        assert peer.closed is not None and here.daemon.counts["undeliverable"] == 1
        assert here.members == {"ann", "bob"}
        await here.says(Heartbeat(), by=ann)
        for _ in range(2):
            assert isinstance(decode(await ann.receive(), ToAny), Welcome)
        for _ in range(5):
            assert isinstance(decode(await slow.receive(), ToAny), Welcome)
        await here.says(Heartbeat(), by=slow)
        refused = decode(await slow.receive(), ToAny)
        assert isinstance(refused, Refused) and refused.stranger
        await here.says(replace(ANN, incarnation=1), by=slow)
        assert isinstance(decode(await slow.receive(), ToAny), Welcome)
        assert here.daemon.core.roster.peers[PeerName("ann")].closed is None
