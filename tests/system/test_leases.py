"""Real processes that are busy, stopped, killed or cut off: who is unreachable, who is lost, and who goes on."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from system_processes import LONG, SCRIPTED, Machine, Program, machine, wait_until

pytestmark = pytest.mark.timeout(240)
SMALL = ("--rounds", "2", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def page(coordinator: Program, name: str) -> str:
    url = json.loads(coordinator.out.read_text().splitlines()[0])["http"]
    with urllib.request.urlopen(f"{url}/{name}", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def status(coordinator: Program) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page(coordinator, "status.json"))
    return found


def member(coordinator: Program, name: str) -> dict[str, Any] | None:
    return next((peer for peer in status(coordinator)["peers"] if peer["name"] == name), None)


def refused(coordinator: Program, reason: str) -> float:
    """How many messages were refused for this reason."""
    families = text_string_to_metric_families(page(coordinator, "metrics"))
    samples = [each for family in families for each in family.samples if each.labels.get("reason") == reason]
    return sum(each.value for each in samples)


def start(here: Machine, *options: str) -> tuple[Program, str]:
    coordinator = here.start("coordinator", "--bind", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", *options)
    return coordinator, coordinator.ready()


def serve(here: Machine, address: str, name: str) -> Program:
    server = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", name)
    server.ready()
    return server


def stop(*programs: Program) -> None:
    for program in programs:
        program.signal(signal.SIGTERM)
        assert program.wait() == 0, program.story()
        assert "Traceback" not in program.err.read_text()


def test_a_worker_that_computes_for_five_seconds_is_not_given_up(here: Machine) -> None:
    """Cases B5 and 11: the lease is 3 s, so a member is lost after 6 s without a word."""
    coordinator, address = start(here, "--lease", "3")
    mark = here.place / "mark"
    script = str(Path(__file__).with_name("slow_taskserver.py"))
    server = here.python(script, str(mark), "5", "taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    server.ready()
    run = here.start("run", "guess", "--coordinator", address, *SMALL, "--out", "run")
    assert run.wait() == 0, run.story()
    assert mark.exists() and here.exit()["reason"] == "finished"
    told = coordinator.err.read_text()
    assert "event=lost" not in told and "event=unreachable" not in told
    counts = status(coordinator)["counts"]  # the host has asked again, and every answer counted once
    assert counts["turns"] == 8 and counts.get("refused answers", 0) <= counts.get("repeated OpenTurn", 0)
    assert {row["episodes"] for row in here.rows()} == {4}
    stop(server, coordinator)


def test_a_worker_whose_loop_is_blocked_for_longer_than_its_lease_is_given_up(here: Machine) -> None:
    """Case 11: its connection lives, because ZeroMQ answers heartbeats from a thread of its own; the lease is the truth."""
    coordinator, address = start(here, "--lease", "2")
    mark = here.place / "mark"
    script = str(Path(__file__).with_name("slow_taskserver.py"))
    server = here.python(script, str(mark), "15", "taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    server.ready()
    here.start("run", "guess", "--coordinator", address, *SMALL, "--out", "run")
    wait_until(lambda: member(coordinator, "server") is None, coordinator.story)
    assert not mark.exists() and "event=lost member=server" in coordinator.err.read_text()
    wait_until(lambda: mark.exists() and member(coordinator, "server") is not None, coordinator.story)


def test_a_stopped_task_server_is_given_up_and_fenced_when_it_wakes(here: Machine) -> None:
    """Cases 10 and K3: its requests go to another one, what it says late is refused, and it joins anew."""
    coordinator, address = start(here, "--lease", "5")
    first = serve(here, address, "first")
    second = serve(here, address, "second")
    run = here.start("run", "guess", "--coordinator", address, *LONG, "--out", "run")
    wait_until(lambda: bool(here.rows()) or run.over, run.story)
    second.signal(signal.SIGSTOP)
    wait_until(lambda: member(coordinator, "second") is None or run.over, coordinator.story)
    rounds = len(here.rows())
    wait_until(lambda: len(here.rows()) >= rounds + 4 or run.over, run.story)  # it goes on with the first one
    assert not run.over, run.story()
    assert "event=lost member=second" in coordinator.err.read_text()
    before = refused(coordinator, "not a member")
    second.signal(signal.SIGCONT)
    wait_until(lambda: member(coordinator, "second") is not None, coordinator.story)
    assert refused(coordinator, "not a member") > before
    assert coordinator.err.read_text().count("event=joined member=second") == 2
    assert "event=refused what=" in second.err.read_text()
    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.story()
    stop(second, first, coordinator)


def test_a_stopped_host_is_unreachable_at_first_and_goes_on_within_its_lease(here: Machine) -> None:
    coordinator, address = start(here, "--lease", "60")
    server = serve(here, address, "server")
    run = here.start("run", "guess", "--coordinator", address, *LONG, "--out", "run", "--set", "turn_deadline=600")
    wait_until(lambda: bool(here.rows()) or run.over, run.story)
    name = f"host-{run.process.pid}"
    run.signal(signal.SIGSTOP)
    wait_until(lambda: (member(coordinator, name) or {}).get("unreachable") is not None, coordinator.story)
    told = here.start("status", "--http", str(coordinator.out))
    assert told.wait() == 0, told.story()
    assert f"host {name} (process {run.process.pid} on" in told.out.read_text()
    assert "unreachable for " in told.out.read_text()
    rounds = len(here.rows())
    run.signal(signal.SIGCONT)
    wait_until(lambda: len(here.rows()) >= rounds + 4 or run.over, run.story)
    assert not run.over, run.story()
    assert (member(coordinator, name) or {})["unreachable"] is None
    assert "event=lost" not in coordinator.err.read_text()
    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.story()
    stop(server, coordinator)


@pytest.mark.parametrize("who", ["server", "host"])
def test_the_end_of_a_process_of_this_machine_is_seen_at_once(here: Machine, who: str) -> None:
    """Cases 7 and B1: nobody waits for its lease, which is a minute."""
    coordinator, address = start(here, "--lease", "60")
    server = serve(here, address, "server")
    run = here.start("run", "guess", "--coordinator", address, *LONG, "--out", "run")
    wait_until(lambda: bool(here.rows()) or run.over, run.story)
    victim, name = (server, "server") if who == "server" else (run, f"host-{run.process.pid}")
    victim.signal(signal.SIGKILL)
    wait_until(lambda: member(coordinator, name) is None, coordinator.story, 30.0)
    assert f'event=lost member={name} why="its process {victim.process.pid} has ended"' in coordinator.err.read_text()
    os.kill(coordinator.process.pid, 0)
    if who == "host":
        wait_until(lambda: not status(coordinator)["runs"], coordinator.story)
        stop(server)
    stop(coordinator)
