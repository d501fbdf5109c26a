"""Real processes: a run from one command, the three by hand, and every way in which one of them can end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_processes import LONG, SCRIPTED, Machine, machine, wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def test_one_command_plays_a_run_to_its_end_and_leaves_only_its_directory(here: Machine) -> None:
    small = ("--rounds", "2", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")
    program = here.start("run", "nim", *SCRIPTED, *small, "--out", ".")
    assert program.wait() == 0, program.story()
    assert here.exit(".") == {"reason": "finished", "code": 0, "detail": "all 2 rounds were played"}
    assert [row["round"] for row in here.rows(".")] == [1, 1, 2, 2]
    assert "# nim" in (here.place / "summary.md").read_text()
    assert (here.place / "adapters/alpha/final/adapter_model.safetensors").exists()
    assert program.err.read_text() == ""
    here.assert_clean(program)


def test_the_three_can_be_started_by_hand(here: Machine) -> None:
    coordinator = here.start("coordinator", "--bind", "tcp://127.0.0.1:0")
    address = coordinator.ready()
    server = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    other = here.start("coordinator", "--bind", address)
    assert server.ready() == address
    twin = here.start("taskserver", "--coordinator", address, *SCRIPTED, "--name", "server")
    small = ("--rounds", "2", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")
    run = here.start("run", "dilemma", "--coordinator", address, *small, "--out", "run")

    assert other.wait() == 2
    assert f"opentinker: {address} is already in use: stop the process that listens there" in other.err.read_text()
    assert twin.wait() == 2  # case K2: the second of one name is refused, and told where the first is
    told = twin.err.read_text()
    assert "the name 'server' is already in use by process" in told
    assert str(server.process.pid) in told
    assert "Traceback" not in told
    assert run.wait() == 0, run.story()
    assert here.exit()["reason"] == "finished"

    for daemon in (server, coordinator):
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.story()
        assert "Traceback" not in daemon.err.read_text()
    assert "left" in coordinator.err.read_text()  # it heard the task server's good-bye
    here.assert_clean(run)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_drains_the_run_and_keeps_its_finished_rounds(here: Machine, how: signal.Signals) -> None:
    program = here.run()
    program.signal(how)
    assert program.wait() == 0, program.story()
    assert here.exit()["reason"] == "interrupted"
    rows = here.rows()
    final = (here.place / "run/adapters/guesser/final").resolve()
    assert int(final.name[1:]) >= rows[-1]["version"]
    assert (here.place / "run/summary.md").exists()
    here.assert_clean(program)


def test_an_interrupt_during_the_first_imports_is_no_traceback(here: Machine) -> None:
    program = here.python(
        "-X", "importtime", "-m", "coordinator.cli.main", "run", "guess", *SCRIPTED, *LONG, "--out", "run"
    )
    wait_until(lambda: "| coordinator.cli\n" in program.err.read_text(), program.story)
    program.signal(signal.SIGINT)
    assert program.wait() in (-signal.SIGINT, 0, 130), program.story()
    assert "Traceback" not in program.err.read_text()


@pytest.mark.parametrize("name", ["coordinator", "taskserver"])
def test_an_interrupt_while_starting_leaves_nothing(here: Machine, name: str) -> None:
    program = here.start("run", "guess", *SCRIPTED, *LONG, "--out", "run")
    program.child(name)
    program.signal(signal.SIGTERM if name == "taskserver" else signal.SIGINT)
    assert program.wait() in (0, 130), program.story()
    assert here.exit()["reason"] == "interrupted"
    assert "Traceback" not in program.err.read_text()
    here.assert_clean(program)


def test_a_second_interrupt_ends_at_once(here: Machine) -> None:
    program = here.run()
    server = program.child("taskserver")
    server.suspend()  # so that the drain cannot end
    rounds = len(here.rows())
    program.signal(signal.SIGINT)
    program.signal(signal.SIGTERM)  # two of one kind may arrive as one
    assert program.wait(10.0) in (130, 143), program.story()
    assert len(here.rows()) >= rounds
    here.assert_clean(program)


def test_a_killed_coordinator_ends_the_run_and_is_named(here: Machine) -> None:
    """Case B1."""
    program = here.run()
    program.child("coordinator").kill()
    assert program.wait() == 3, program.story()
    assert here.exit()["reason"] == "process died"
    for told in (here.exit()["detail"], program.err.read_text()):
        assert "the coordinator process was ended by signal 9 (SIGKILL); the end of its log" in told
        assert "Traceback" not in told
    assert "event=" in here.exit()["detail"]
    assert here.rows()
    here.assert_clean(program)


def test_a_killed_task_server_is_started_again_and_the_run_goes_on(here: Machine) -> None:
    """Until it is killed too often: then that is what the run says."""
    program = here.run()
    killed = set[int]()
    for _ in range(3):
        child = program.child("taskserver", but=killed)
        before = len(here.rows())
        child.kill()
        killed.add(child.pid)
        wait_until(lambda before=before: len(here.rows()) > before or program.over, program.story)  # type: ignore[misc]
        assert not program.over, program.story()
    assert "the taskserver process was ended by signal 9 (SIGKILL); it is started again" in program.out.read_text()
    numbers = [row["round"] for row in here.rows()]
    assert numbers == sorted(numbers) and all("count/refused_updates" not in row for row in here.rows())
    program.child("taskserver", but=killed).kill()
    assert program.wait() == 3, program.story()
    for told in (here.exit()["detail"], program.err.read_text()):
        assert "was ended by signal 9 (SIGKILL) (it had been started again 3 times); the end of its log" in told
    here.assert_clean(program)


def test_a_daemon_that_is_killed_while_another_starts_is_named(here: Machine) -> None:
    """Case B1, before it is ready: nobody waits for what cannot come."""
    program = here.start("run", "guess", *SCRIPTED, *LONG, "--out", "run")
    program.child("taskserver")
    program.child("coordinator").kill()
    assert program.wait(10.0) == 3, program.story()
    assert "the coordinator process was ended by signal 9" in program.err.read_text()
    here.assert_clean(program)


def test_the_daemons_of_a_killed_run_leave_by_themselves(here: Machine) -> None:
    program = here.run()
    assert len(program.children()) == 2
    program.signal(signal.SIGKILL)
    program.wait()
    here.assert_clean(program)
    assert not (here.place / "run/exit.json").exists()
    wait_until(lambda: "parent is gone" in (here.place / "run/logs/taskserver.log").read_text(), program.story)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://example.com:1", "nonsense"])
def test_a_coordinator_listens_to_this_machine_only(here: Machine, bind: str) -> None:
    program = here.start("coordinator", "--bind", bind)
    assert program.wait() == 2
    assert program.err.read_text().startswith("opentinker: ")
    assert "Traceback" not in program.err.read_text()
