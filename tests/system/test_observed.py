"""A run that is watched over HTTP is the run that nobody watches."""

from __future__ import annotations

import copy
from pathlib import Path

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from system_scenarios import three_turns
from system_world import Keeping, Ran, said, until, world

from coordinator.web.pages import bound
from coordinator.web.server import SNAPSHOT, serving

PAGES = ("/healthz", "/readyz", "/metrics", "/status.json")


class Gated(Keeping):
    """Answers only while it may."""

    def __init__(self) -> None:
        super().__init__(lambda request: said("7"))
        self.gate = anyio.Event()
        self.waiting = 0
        self._latency = 1.0
        self._sleep = self._wait_for_gate

    async def _wait_for_gate(self, _: float) -> None:
        self.waiting += 1
        await self.gate.wait()


async def test_a_hundred_scrapes_of_a_running_round_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker.client.asked.FIRST", 3600.0)  # nobody says anything between two looks at the core
    monkeypatch.setattr("coordinator.core.coordinator.NOTICE", 3600.0)
    rans: list[Ran] = []

    async with world(tmp_path) as here, serving(here.daemon, bound("127.0.0.1:0")) as url:
        here.core.lease = 3600.0
        engine = Gated()
        await here.serve(engine)

        async def play() -> None:
            rans.append(await here.run(three_turns))

        async with httpx.AsyncClient(base_url=url, trust_env=False) as http, anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            await until(lambda: engine.waiting == 8)
            before = copy.deepcopy(here.core)
            for _ in range(100):
                for page in PAGES:
                    assert (await http.get(page)).status_code == 200
            status = SNAPSHOT.validate_json((await http.get("/status.json")).content)
            assert here.core == before
            assert status.runs[0].missing[0].why == "8 requests are at server/rollout-0"

            engine.gate.set()
            await until(lambda: bool(rans))
            families = text_string_to_metric_families((await http.get("/metrics")).text)
            found = {sample.name: sample.value for family in families for sample in family.samples}
    assert rans[0].exit.code == 0
    assert found["opentinker_rounds_total"] == 2
    assert found["opentinker_turns_total"] == 2 * 4 * 3
    assert found["opentinker_open_turns"] == 0
