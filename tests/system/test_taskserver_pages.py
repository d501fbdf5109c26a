"""The pages of a real task server process: before there is a coordinator, while it serves a run, and after."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from system_processes import SCRIPTED, Machine, Program, machine, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def pages(server: Program) -> httpx.Client:
    """Where its pages are, as its log says."""
    found: list[str] = []

    def there() -> bool:
        found[:] = re.findall(r"http=(\S+)", server.err.read_text())
        return bool(found) or server.over

    wait_until(there, server.story)
    return httpx.Client(base_url=found[0], trust_env=False)


def test_a_task_server_is_watched_from_its_start_to_its_end(here: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    server = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", "server", "--http", "127.0.0.1:0")
    with pages(server) as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 503

        coordinator = here.start("coordinator", "--bind", address)
        server.ready()
        wait_until(lambda: http.get("/readyz").status_code == 200, server.story)
        assert f'"http": "{str(http.base_url).rstrip("/")}"' in server.out.read_text()

        small = ("--rounds", "2", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")
        run = here.start("run", "dilemma", "--coordinator", address, *small, "--out", "run")
        assert run.wait() == 0, run.story()
        families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        found = {
            (each.name.removeprefix("opentinker_taskserver_"), *each.labels.values()): each.value for each in samples
        }
        assert found["jobs_total", "generate", "done"] >= 2 * 2 * 2 * 2
        assert found["jobs_total", "operation", "done"] > 0
        assert ("jobs_total", "operation", "failed") not in found
        assert found["bundle_bytes_total", "read"] > 0
        assert found["restarts_total", "server/rollout-0"] == 0

        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.story()
        with pytest.raises(httpx.TransportError):
            http.get("/healthz")
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0, coordinator.story()
    here.assert_clean(run)


@pytest.mark.parametrize("where", ["0.0.0.0:0", "example.com:7656", "nonsense"])
def test_its_pages_are_for_this_machine_only(here: Machine, where: str) -> None:
    server = here.start("taskserver", *SCRIPTED, "--http", where)
    assert server.wait() == 2, server.story()
    assert server.err.read_text().startswith("opentinker: ")
    assert "Traceback" not in server.err.read_text()
    assert [*here.temporary.iterdir()] == []
