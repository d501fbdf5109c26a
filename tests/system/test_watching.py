"""`opentinker status --coordinator` and `opentinker drain` through the real command line, without keys and with them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_processes import SCRIPTED, Machine, Program, machine
from test_security import authorize, make_keys

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def ended(program: Program, code: int) -> str:
    """What it printed, on stdout if all is well."""
    assert program.wait() == code, program.story()
    err = program.err.read_text()
    assert "Traceback" not in err
    return err if code else program.out.read_text()


def test_a_coordinator_without_pages_is_watched_and_drained(here: Machine) -> None:
    coordinator = here.start("coordinator", "--bind", "tcp://127.0.0.1:0")
    address = coordinator.ready()
    server = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    server.ready()
    told = json.loads(ended(here.start("status", "--coordinator", address, "--json"), 0))
    assert [(peer["name"], peer["pid"]) for peer in told["peers"]] == [("server", server.process.pid)]
    assert "taskserver server (process" in ended(here.start("status", "--coordinator", address), 0)
    assert "it drains: " in ended(here.start("drain", "--coordinator", address), 0)
    assert coordinator.wait() == 0, coordinator.story()
    assert 'event="told to drain" by="somebody of this machine"' in coordinator.err.read_text()


def test_keys_decide_who_may_look_and_who_may_drain(here: Machine) -> None:
    keys = make_keys(here.place, "hub", "vic", "opal", "pete")
    listed = authorize(here.place, ("viewer", "vic"), ("operator", "opal"), ("player", "pete"))
    coordinator = here.start(
        "coordinator", "--bind", "tcp://127.0.0.1:0", "--key", str(keys / "hub.key"), "--authorized", str(listed)
    )
    address = coordinator.ready()

    def say(command: str, who: str, *more: str) -> Program:
        return here.start(command, "--coordinator", address, "--key", str(keys / f"{who}.key"), *more)

    for who in ("vic", "opal"):
        assert json.loads(ended(say("status", who, "--json"), 0))["coordinator"] == "coordinator"
    assert "(pete) is for player, which may not send this" in ended(say("status", "pete"), 3)
    assert "refused Drain: your key" in ended(say("drain", "vic"), 3)
    assert "it drains" in ended(say("drain", "opal"), 0)
    assert coordinator.wait() == 0, coordinator.story()
    assert 'event="told to drain" by="opal (' in coordinator.err.read_text()


@pytest.mark.parametrize("command", ["status", "drain"])
def test_who_asks_nobody_is_told_so(here: Machine, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    assert f"no coordinator answers at {address}" in ended(here.start(command, "--coordinator", address), 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--coordinator", "nonsense"), "is no address"),
        (("--coordinator", "tcp://10.0.0.1:1"), "that needs keys"),
        (("--coordinator", "tcp://127.0.0.1:1", "--http", "127.0.0.1:1"), "give one of them"),
        (("--key", "ann.key"), "are for --coordinator"),
        (("--coordinator", "tcp://127.0.0.1:1", "--key", "nowhere.key"), "cannot read nowhere.key"),
    ],
)
def test_a_status_that_cannot_be_asked_for_is_refused(here: Machine, options: tuple[str, ...], says: str) -> None:
    assert says in ended(here.start("status", *options), 2)
