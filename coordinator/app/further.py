"""`opentinker host`: a further host of somebody's run. It plays what it is dealt until the run is over, or until it is told to leave.

What it has played lies on the data plane of the task server that serves the run. Told to leave, it is dealt nothing more, plays what it has
for a while, and hands back the rest: the coordinator deals that to others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog

from coordinator.app.config import ConfigError
from coordinator.app.deliveries import bundle_of, packed
from coordinator.app.production import further_production, terms
from coordinator.app.rundir import Exit
from scenarios import Scenario
from scenarios.further import FurtherHost
from scenarios.host import Host
from tinker.client import Client, ClientError, CoordinatorLost, Event, RunOver
from tinker.protocol.episodes import Episode
from tinker.protocol.to_any import Draining
from tinker.protocol.to_coordinator import Enlist, Hello, Played
from tinker.protocol.to_host import Enlisted, Queued, Settled
from tinker.protocol.values import Dealt, PeerName, Role, RunId
from tinker.runtime.bulk import BULK_LIMITS, BulkClient, BulkError, machine_id
from tinker.runtime.clock import Clock, MonotonicClock
from tinker.runtime.transport import Transport, ZmqTransport
from tinker.tokens import ChatTemplate, Tokenizer, TokenizerError

AGAIN = 2.0  # seconds until a delivery that failed is tried again
JOIN = 15.0  # seconds a coordinator may take to welcome us
DRAIN = 10.0  # seconds for what is in hand when we are told to leave
log = structlog.get_logger("host")


@dataclass(slots=True)
class Further:
    """One further host, from joining to leaving. `capacity`: episodes it plays at once; `grace`: seconds to finish what is in hand when it
    is told to leave; `on_enlisted` is called when it is one of the run's hosts."""

    run: RunId
    scenario: Scenario
    address: str
    capacity: int
    name: str = field(default_factory=lambda: f"host-{os.getpid()}")
    grace: float = DRAIN
    clock: Clock = field(default_factory=MonotonicClock)
    transport: Transport = field(default_factory=ZmqTransport)
    machine: str = field(default_factory=machine_id)
    on_enlisted: Callable[[], None] = lambda: None
    _leaving: anyio.Event = field(default_factory=anyio.Event)
    _host: FurtherHost | None = None

    def leave(self) -> None:
        """Be dealt nothing more, and end when what is in hand is settled, or the grace time is over."""
        self._leaving.set()

    async def serve(self) -> Exit:
        """Never raises for anything that can go wrong with the run: the exit says what did."""
        hello = Hello(Role.HOST, PeerName(self.name), self.machine, os.getpid())
        client = Client(self.transport.connect(self.address), hello, self.clock, self._on_event)
        exit = Exit("left", 0, "it was told to leave")
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.serve, name="client")
            try:
                with anyio.CancelScope() as scope:
                    tasks.start_soon(self._leave, client, scope, name="leave")
                    exit = await self._play(client)
                await client.leave(exit.reason)
            except RunOver as over:
                exit = Exit("finished", 0, str(over)) if over.finished else Exit("stopped", 3, str(over))
                await client.leave(exit.reason)
            except CoordinatorLost as error:
                exit = Exit("coordinator lost", 3, str(error))
            except (ClientError, ConfigError, TokenizerError) as error:
                exit = Exit("refused", 1, str(error))
                await client.leave(exit.reason)
            tasks.cancel_scope.cancel()
        log.info("left", run=self.run, why=exit.detail, episodes=self._host.played if self._host is not None else 0)
        return exit

    async def _play(self, client: Client) -> Exit:
        await client.joined(JOIN, self.address)
        enlisted = await self._enlist(client)
        template = ChatTemplate(Tokenizer.from_bundle(enlisted.tokenizer))
        production = further_production(enlisted, self.scenario, template, self.capacity)
        bulk = BulkClient(partial(self.transport.connect, limits=BULK_LIMITS), machine=self.machine)
        deliver = partial(self._deliver, client, bulk, enlisted.data)
        self._host = FurtherHost(Host(client, production, self.clock.now), deliver, self.capacity)
        log.info("enlisted", run=self.run, learner=enlisted.learner, model=enlisted.model.name, capacity=self.capacity)
        self.on_enlisted()
        await self._host.serve(client.plays)
        if client.broken is not None:
            raise client.broken
        return Exit("left", 0, "it was told to leave, and what it had in hand is played")

    async def _enlist(self, client: Client) -> Enlisted:
        """Become one of the run's hosts, or, being one, hear again what that means now."""
        return await client.enlist(Enlist(self.run, self.scenario.name, self.capacity, terms(self.scenario)))

    async def _leave(self, client: Client, playing: anyio.CancelScope) -> None:
        await self._leaving.wait()
        if self._host is None:
            playing.cancel()
            return
        log.info("leaving", run=self.run, grace=self.grace)
        client.retire()
        await self.clock.sleep_until(self.clock.now() + self.grace)
        log.warning("hands back what it has not played", run=self.run)
        playing.cancel()

    async def _deliver(
        self, client: Client, bulk: BulkClient, endpoint: str, deal: Dealt, episodes: list[Episode]
    ) -> None:
        """Store them where the learner host finds them, and say so. Tried again until the deal is settled, where the update worker is by
        then: another task server may have taken its place."""
        files = packed(episodes)
        while True:
            try:
                ref = await bulk.push(endpoint, bundle_of(self.run, deal, files), files)
                break
            except BulkError as error:
                log.warning("not delivered yet", run=self.run, group=deal.group, why=str(error))
            await self.clock.sleep_until(self.clock.now() + AGAIN)
            try:
                endpoint = (await self._enlist(client)).data
            except ClientError:  # nothing is answered any more; `_play` says why
                return
            if self._leaving.is_set():  # whoever enlists is dealt to again
                client.retire()
        client.deliver(Played(self.run, deal, tuple(each.episode for each in episodes), ref))

    def _on_event(self, event: Event) -> None:
        match event:
            case Settled():
                if self._host is not None:
                    self._host.settled(event.deals)
                    if not event.deals:
                        self._host.retire()
            case Queued():
                log.info("waiting", run=self.run, why=event.reason)
            case Draining():
                log.info("coordinator drains", why=event.reason)
            case _:
                pass
