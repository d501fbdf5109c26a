"""What a task server says of itself over real HTTP: whether it is ready, what it does, and what it has done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
from anyio.lowlevel import checkpoint
from prometheus_client.parser import text_string_to_metric_families
from server_desk import WORKER, desk, request

from coordinator.web import taskserver
from coordinator.web.pages import bound, served
from tinker.protocol.operations import OptimStep
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import Bye, Generated, Hello, LoadFailed, WorkerFailed
from tinker.protocol.to_taskserver import Load, Work
from tinker.protocol.values import AdamSpec, BlobRef, OpId, PolicyName, PolicyVersion, RunId, WorkerName

RUN, UPDATER = RunId("run"), WorkerName("server/update-0")
NOWHERE = BlobRef("b", "digest", 1, "elsewhere", "/nowhere", "")


@asynccontextmanager
async def watched(look: taskserver.Look) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        served(taskserver.application(look), bound("127.0.0.1:0")) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        yield http


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Every sample as name{label values}: value."""
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    return {
        f"{sample.name}{{{','.join(sample.labels.values())}}}".removeprefix("opentinker_taskserver_"): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def readiness(http: httpx.AsyncClient) -> tuple[int, str]:
    assert (await http.get("/healthz")).text == "ok\n"
    answer = await http.get("/readyz")
    return answer.status_code, answer.text


async def test_before_its_model_is_loaded_it_is_healthy_not_ready_and_counts_nothing() -> None:
    async with watched(lambda: None) as http:
        assert await readiness(http) == (503, "its model is being loaded\n")
        assert await metrics(http) == {}


async def test_it_is_ready_while_it_is_a_member_and_does_not_drain(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, watched(here.server.status) as http:
        await here.begins(request(0))
        assert await readiness(http) == (200, "ready\n")
        here.says(Refused("Heartbeat", "you are no member", stranger=True))
        assert isinstance(await here.hears(), Hello)
        assert await readiness(http) == (503, "the coordinator has not said welcome (yet)\n")
        assert (await metrics(http))["ready{}"] == 0.0
        here.welcomes()
        await here.begins(request(1))
        assert await readiness(http) == (200, "ready\n")
        here.server.drain()
        assert await readiness(http) == (503, "draining: it was told to stop\n")
        here.open.set()


async def test_it_counts_what_waits_what_is_done_and_what_has_failed(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, watched(here.server.status) as http:
        before = await metrics(http)
        assert {name: value for name, value in before.items() if "capacity" in name or "workers" in name} == {
            "capacity{rollout}": 256.0, "capacity{forward}": 1.0, "capacity{update}": 1.0,
            "workers{rollout}": 1.0, "workers{forward}": 1.0, "workers{update}": 1.0,
        }  # fmt: skip
        await here.begins(request(0), request(1))
        during = await metrics(http)
        assert (during["in_flight{rollout}"], during["in_flight{update}"], during["queue{rollout}"]) == (2, 0, 0)
        here.open.set()
        assert isinstance(await here.hears(), Generated) and isinstance(await here.hears(), Generated)
        here.says(request(0))  # it is answered again, not done again
        assert isinstance(await here.hears(), Generated)
        here.says(Load(RUN, WORKER, PolicyVersion(PolicyName("p"), 1), NOWHERE))
        assert isinstance(await here.hears(), LoadFailed)
        here.says(Work(RUN, OpId("op"), UPDATER, PolicyName("p"), OptimStep(AdamSpec(1.0))))
        assert isinstance(await here.hears(), WorkerFailed)
        after = await metrics(http)
        assert {name: value for name, value in after.items() if name.startswith("jobs")} == {
            "jobs_total{generate,done}": 2.0, "jobs_total{load,failed}": 1.0, "jobs_total{operation,failed}": 1.0
        }  # fmt: skip
        assert after["in_flight{rollout}"] == 0.0
        assert set(taskserver.names()) <= {f"opentinker_taskserver_{name.partition('{')[0]}" for name in after} | {
            "opentinker_taskserver_bundle_bytes_total"  # nothing has moved
        }


async def test_a_full_worker_has_a_queue(tmp_path: Path) -> None:
    async with desk(tmp_path, capacity=1) as here, watched(here.server.status) as http:
        await here.begins(request(0))
        for number in (1, 2, 3):  # the second waits for room in the worker's hand, the others in its mailbox
            here.says(request(number))
        while (now := await metrics(http))["in_flight{rollout}"] < 4.0:
            await checkpoint()
        await anyio.wait_all_tasks_blocked()
        now = await metrics(http)
        assert (now["capacity{rollout}"], now["in_flight{rollout}"], now["queue{rollout}"]) == (1.0, 4.0, 2.0)


async def test_restarts_are_counted_by_name_also_when_the_worker_was_given_up(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, watched(here.server.status) as http:
        await here.begins(request(0))
        for restarts in (1, 2, 3, 3):
            await here.breaks_a_worker()
            assert (await metrics(http))["restarts_total{server/rollout-0}"] == restarts
        now = await metrics(http)
        assert (now["workers{rollout}"], now["capacity{rollout}"], now["workers{update}"]) == (0.0, 0.0, 1.0)
        assert now["restarts_total{server/update-0}"] == 0.0


async def test_a_server_that_has_left_says_so(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, watched(here.server.status) as http:
        here.server.drain()
        assert await here.hears() == Bye("it was told to stop")
        await here.over.wait()
        assert (await readiness(http))[0] == 503
