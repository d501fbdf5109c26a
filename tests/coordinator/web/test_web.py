"""Every route over real HTTP, with a daemon that nobody has joined yet, that has members, and that drains."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from coordinator.app.daemon import Daemon
from coordinator.app.snapshot import snapshot
from coordinator.core.coordinator import Coordinator
from coordinator.web.metrics import READINGS, names
from coordinator.web.pages import bound
from coordinator.web.server import SNAPSHOT, application, serving
from tinker.protocol.to_coordinator import (
    AgentSpec,
    Arrive,
    Bye,
    Hello,
    OpenTurn,
    RunSpec,
    Submit,
    ToCoordinator,
    WorkerOffer,
)
from tinker.protocol.to_host import Opened
from tinker.protocol.values import (
    AgentName,
    Edge,
    EpisodeId,
    ModelCard,
    PeerName,
    Phase,
    PolicyName,
    PoolKind,
    Role,
    RunId,
    TurnId,
    WorkerName,
)
from tinker.runtime.clock import ManualClock
from tinker.runtime.codec import encode
from tinker.runtime.transport import AddressInUse, Connection, MemoryNetwork, TransportError

RUN = RunId("run")
SPEC = RunSpec(RUN, "test", (AgentSpec(AgentName("ann"), PolicyName("run/ann")),), 3, 1, 2, 0, 0)
HOST = Hello(Role.HOST, PeerName("host"), "here", 1)
CARD = ModelCard("model", "digest", "tokenizer", 100, 64, (0,))
OFFERS = tuple(WorkerOffer(WorkerName(f"server/{kind}"), kind, "scripted", 8) for kind in PoolKind)
SERVER = Hello(Role.TASKSERVER, PeerName("server"), "here", 2, OFFERS, CARD, "data", b"")


@dataclass(slots=True)
class Site:
    """A daemon on a clock that stands still, and an HTTP client."""

    daemon: Daemon
    clock: ManualClock
    network: MemoryNetwork
    http: httpx.AsyncClient

    async def says(self, *messages: ToCoordinator, by: Connection | None = None) -> Connection:
        """Connect (unless `by` is given) and say this; returns when the daemon has heard it."""
        connection = by or self.network.connect("coordinator")
        wanted = self.daemon.messages + len(messages)
        for message in messages:
            connection.send(encode(message))
        while self.daemon.messages < wanted:
            await checkpoint()
        return connection

    async def metrics(self) -> dict[str, float]:
        """Every sample as name{label values, by label}: value."""
        text = (await self.http.get("/metrics")).text
        return {
            f"{sample.name}{{{','.join(value for _, value in sorted(sample.labels.items()))}}}": sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    network, clock = MemoryNetwork(), ManualClock(100.0)
    daemon = Daemon(Coordinator(PeerName("coordinator")), network.listen("coordinator"), clock)
    async with serving(daemon, bound("127.0.0.1:0")) as url, anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.serve, name="daemon")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            yield Site(daemon, clock, network, http)
        tasks.cancel_scope.cancel()


async def check_health(here: Site) -> None:
    answer = await here.http.get("/healthz")
    assert (answer.status_code, answer.text) == (200, "ok\n")


async def check_readiness(here: Site) -> None:
    host = await here.says(HOST)
    assert (await here.http.get("/readyz")).status_code == 200
    here.daemon.stuck = "the disk is full"
    answer = await here.http.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "nothing goes on: the disk is full\n")
    here.daemon.stuck = ""
    here.daemon.stop()
    while not here.daemon.core.draining:
        await checkpoint()
    answer = await here.http.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "draining: the coordinator is stopping\n")
    assert (await here.http.get("/healthz")).status_code == 200
    await here.says(Bye("done"), by=host)


async def check_metrics(here: Site) -> None:
    await here.says(SERVER)
    await here.says(HOST, Submit(SPEC), Arrive(RUN, 2, Phase.ROLLOUT, Edge.START, AgentName("ann"), 0))
    await here.says(Bye("a stranger"))
    here.clock.advance(3.0)
    opening = Opened(RUN, 1, Phase.UPDATE, Edge.END, ("ann", "bob"), (0.05, 20.0), (), ())
    here.daemon.on_opened(opening)
    found = await here.metrics()
    expected = {
        "opentinker_uptime_seconds{}": 3.0,
        "opentinker_draining{}": 0.0,
        "opentinker_lease_age_seconds{host,host}": 3.0,
        "opentinker_lease_age_seconds{server,taskserver}": 3.0,
        "opentinker_workers{rollout}": 1.0,
        "opentinker_requests_in_flight{server/update}": 0.0,
        "opentinker_runs{rollout}": 1.0,
        "opentinker_runs{queued}": 0.0,
        "opentinker_messages_total{}": 5.0,
        "opentinker_messages_refused_total{Arrive,not allowed}": 1.0,
        "opentinker_messages_refused_total{Bye,not a member}": 1.0,
        "opentinker_rounds_total{}": 1.0,
        "opentinker_barrier_wait_seconds_count{end,update}": 2.0,
        "opentinker_barrier_wait_seconds_bucket{end,0.1,update}": 1.0,
    }
    assert {name: found.get(name) for name in expected} == expected


async def check_status(here: Site) -> None:
    await here.says(HOST, Submit(SPEC))
    here.clock.advance(1.0)
    answer = await here.http.get("/status.json")
    told = SNAPSHOT.validate_json(answer.content)
    assert answer.headers["content-type"] == "application/json"
    assert replace(told, counts={}) == replace(snapshot(here.daemon.core, 101.0, 100.0), counts={})
    assert [(queued.run, queued.host) for queued in told.queue] == [("run", "host")]
    await here.says(Bye("a stranger"))
    told = SNAPSHOT.validate_json((await here.http.get("/status.json")).content)
    assert told.counts == {"refused Bye": 1}


CHECKS: dict[str, Callable[[Site], Awaitable[None]]] = {
    "/healthz": check_health,
    "/readyz": check_readiness,
    "/metrics": check_metrics,
    "/status.json": check_status,
}


@pytest.mark.parametrize("path", sorted(CHECKS))
async def test_a_route_answers(path: str) -> None:
    async with site() as here:
        await CHECKS[path](here)


async def test_every_route_has_a_test() -> None:
    daemon = Daemon(Coordinator(PeerName("coordinator")), MemoryNetwork().listen("coordinator"), ManualClock())
    routes = application(daemon).routes
    assert all(isinstance(route, Route) for route in routes)
    assert [route.path for route in routes if isinstance(route, Route) and route.path not in CHECKS] == []
    assert len(routes) == len(CHECKS)


async def test_it_is_not_ready_before_it_serves() -> None:
    daemon = Daemon(Coordinator(PeerName("coordinator")), MemoryNetwork().listen("coordinator"), ManualClock())
    async with serving(daemon, bound("127.0.0.1:0")) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        assert (await http.get("/readyz")).status_code == 503


async def test_only_reading_is_possible_and_only_under_the_machines_own_names() -> None:
    async with site() as here:
        assert (await here.http.post("/status.json")).status_code == 405
        assert (await here.http.get("/")).status_code == 404
        assert (await here.http.get("/status.json", headers={"host": "evil.example"})).status_code == 400
        assert (await here.http.get("/status.json", headers={"host": "localhost:1"})).status_code == 200


async def test_every_metric_is_scraped_and_no_label_holds_an_episode() -> None:
    async with site() as here:
        await here.says(SERVER)
        host = await here.says(HOST, Submit(SPEC))
        await here.says(OpenTurn(TurnId(RUN, EpisodeId(1, Phase.ROLLOUT, 7), 0), (), 1.0), by=host)
        here.daemon.on_opened(Opened(RUN, 1, Phase.ROLLOUT, Edge.START, ("ann",), (0.0,), (), ()))
        text = (await here.http.get("/metrics")).text
    assert [name for name in names() if f"# HELP {name.removesuffix('_total')}" not in text] == []
    assert "1/rollout/7" not in text
    assert {label for each in READINGS for label in each.labels} == {
        "peer", "role", "run", "kind", "worker", "state", "policy", "reason", "event"
    }  # fmt: skip


async def test_what_is_gone_is_gone_from_the_metrics() -> None:
    async with site() as here:
        server = await here.says(SERVER)
        assert "opentinker_lease_age_seconds{server,taskserver}" in await here.metrics()
        await here.says(Bye("done"), by=server)
        assert not any("server" in name for name in await here.metrics())


async def test_a_client_that_never_finishes_its_request_does_not_hold_up_the_end() -> None:
    async with site() as here:
        address = here.http.base_url
        slow = await anyio.connect_tcp(address.host, address.port or 0)
        await slow.send(b"GET /healthz HTTP/1.1\r\nHost: ")
        await check_health(here)
    await slow.aclose()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:x", ":7655", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(TransportError, match="expected something like"):
        bound(address)


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match="choose another port"):
            bound(f"localhost:{port}")
