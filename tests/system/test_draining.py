"""Draining with real processes: the coordinator, the task server and the hosts between them are told to stop."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_processes import LONG, SCRIPTED, Machine, Program, machine, wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def start(here: Machine, *options: str, run: tuple[str, ...] = ()) -> tuple[Program, Program, Program]:
    """A coordinator, a task server and a host that has finished a round."""
    coordinator = here.start("coordinator", "--bind", "tcp://127.0.0.1:0", *options)
    address = coordinator.ready()
    server = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    server.ready()
    host = here.start("run", "guess", "--coordinator", address, *LONG, *run, "--out", "run")
    wait_until(lambda: bool(here.rows()) or host.over, host.story)
    assert not host.over, host.story()
    return coordinator, server, host


def test_a_coordinator_drains_its_hosts_and_ends(here: Machine) -> None:
    coordinator, _, host = start(here)
    coordinator.signal(signal.SIGTERM)
    assert host.wait() == 0, host.story()
    assert coordinator.wait() == 0, coordinator.story()
    assert here.exit() == {"reason": "interrupted", "code": 0, "detail": "the coordinator is stopping"}
    assert (here.place / "run/summary.md").exists()
    told = coordinator.err.read_text()
    for event in ("event=draining", 'event="run ended"', "event=left", "event=stopped"):
        assert event in told
    assert "not waited for" not in told
    assert "Traceback" not in told + host.err.read_text()


def test_a_coordinator_does_not_wait_for_a_host_beyond_its_grace(here: Machine) -> None:
    coordinator, _, host = start(here, "--grace", "0.2")
    host.signal(signal.SIGSTOP)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0, coordinator.story()
    assert 'event="not waited for any longer" member=host-' in coordinator.err.read_text()
    host.signal(signal.SIGCONT)
    assert host.wait() == 0, host.story()
    assert here.exit()["reason"] == "interrupted"


def test_a_second_signal_ends_a_coordinator_at_once(here: Machine) -> None:
    coordinator, _, host = start(here, "--grace", "600")
    host.signal(signal.SIGSTOP)
    coordinator.signal(signal.SIGTERM)
    wait_until(lambda: "event=draining" in coordinator.err.read_text(), coordinator.story)
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait(10.0) == 130, coordinator.story()


def test_a_host_in_the_queue_ends_with_its_coordinator(here: Machine) -> None:
    coordinator = here.start("coordinator", "--bind", "tcp://127.0.0.1:0")
    host = here.start("run", "guess", "--coordinator", coordinator.ready(), *LONG, "--out", "run")
    wait_until(lambda: 'event="run queued"' in coordinator.err.read_text(), host.story)
    coordinator.signal(signal.SIGTERM)
    assert host.wait() == 0, host.story()
    assert coordinator.wait() == 0, coordinator.story()
    assert here.exit()["reason"] == "interrupted"


def test_the_coordinator_of_a_local_run_drains_it(here: Machine) -> None:
    program = here.run()
    program.child("coordinator").send_signal(signal.SIGTERM)
    assert program.wait() == 0, program.story()
    assert here.exit()["reason"] == "interrupted"
    here.assert_clean(program)


def test_a_task_server_says_good_bye_and_ends(here: Machine) -> None:
    coordinator, server, host = start(here, run=("--set", "worker_deadline=1"))
    server.signal(signal.SIGTERM)
    assert server.wait() == 0, server.story()
    assert host.wait() == 3, host.story()
    assert "it left: it was told to stop" in here.exit()["detail"]
    assert 'event=left member=server reason="it was told to stop"' in coordinator.err.read_text()
    assert "event=draining grace=10.0" in server.err.read_text()


def test_both_daemons_can_log_in_json(here: Machine) -> None:
    coordinator = here.start("coordinator", "--bind", "tcp://127.0.0.1:0", "--log-format", "json")
    arguments = ("--coordinator", coordinator.ready(), *SCRIPTED, "--name", "server", "--log-format", "json")
    server = here.start("taskserver", *arguments)
    server.ready()
    for daemon in (server, coordinator):
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.story()
        lines = [json.loads(line) for line in daemon.err.read_text().splitlines()]
        assert all(line.keys() >= {"event", "level", "timestamp"} for line in lines)
        assert "draining" in [line["event"] for line in lines]
    assert {"event": "left", "member": "server"}.items() <= next(
        line for line in map(json.loads, coordinator.err.read_text().splitlines()) if line["event"] == "left"
    ).items()


def test_status_shows_a_running_coordinator_and_says_when_there_is_none(here: Machine) -> None:
    coordinator, _, host = start(here, "--http", "127.0.0.1:0")
    shown = here.start("status", "--http", str(coordinator.out))
    assert shown.wait() == 0, shown.story()
    told = shown.out.read_text()
    assert "coordinator coordinator (epoch " in told
    assert "taskserver server" in told
    assert "(guess) of host-" in told

    url = json.loads(coordinator.out.read_text())["http"]
    everything = here.start("status", "--http", url, "--json")
    assert everything.wait() == 0, everything.story()
    assert json.loads(everything.out.read_text())["runs"][0]["scenario"] == "guess"

    following = here.start("status", "--http", url, "--follow", "--json")
    wait_until(lambda: following.out.read_text().count("\n") >= 2, following.story)
    following.signal(signal.SIGINT)
    assert following.wait() == 0, following.story()

    host.signal(signal.SIGINT)
    host.wait()
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0, coordinator.story()
    nobody = here.start("status", "--http", str(coordinator.out))
    assert nobody.wait() == 3, nobody.story()
    assert "no coordinator answers at http://127.0.0.1:" in nobody.err.read_text()
    assert "Traceback" not in nobody.err.read_text() + following.err.read_text()


@pytest.mark.parametrize("http", ["0.0.0.0:0", "nonsense"])
def test_http_is_for_this_machine_only(here: Machine, http: str) -> None:
    program = here.start("coordinator", "--bind", "tcp://127.0.0.1:0", "--http", http)
    assert program.wait() == 2, program.story()
    assert program.err.read_text().startswith("opentinker: refusing to ")
