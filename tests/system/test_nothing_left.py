"""After a program has ended, however it did, no process, no socket file and no shared memory of it is left, and nothing in its TMPDIR."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_owned import Owned
from system_processes import SCRIPTED, Machine, Program, machine, wait_until

pytestmark = pytest.mark.timeout(120)
SMALL = ("--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0", "--out", "run")
LEAVES_EVERYTHING = """
import mmap, socket, subprocess, sys, time
memory = open(sys.argv[2], "w+b"); memory.truncate(64); mapped = mmap.mmap(memory.fileno(), 64)
bound = socket.socket(socket.AF_UNIX); bound.bind(sys.argv[1]); bound.listen()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True); time.sleep(600)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def nothing_left(owned: Owned, here: Machine, program: Program) -> None:
    wait_until(lambda: not owned.left(), lambda: f"left: {owned.left()}\n{program.story()}")
    assert [*here.temporary.rglob("*")] == []


@pytest.mark.parametrize("how", ["its end", "SIGTERM", "SIGKILL"])
def test_a_run_leaves_nothing(here: Machine, how: str) -> None:
    """By SIGKILL: its daemons notice that their parent is gone."""
    owned = Owned()
    rounds = "15" if how == "its end" else "100000"
    program = here.start("run", "guess", *SCRIPTED, "--rounds", rounds, *SMALL)
    wait_until(lambda: bool(here.rows()) or program.over, program.story)
    owned.look(program.process.pid)
    assert len(owned.processes) >= 3, program.story()  # itself, a coordinator, a task server
    if how == "SIGTERM":
        program.signal(signal.SIGTERM)
    elif how == "SIGKILL":
        program.signal(signal.SIGKILL)
    assert program.wait() == (-signal.SIGKILL if how == "SIGKILL" else 0), program.story()
    nothing_left(owned, here, program)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL of their parent"])
def test_daemons_on_ipc_sockets_leave_nothing(here: Machine, how: str) -> None:
    owned, place = Owned(), here.place / "sockets"
    place.mkdir(mode=0o700)
    program = here.python(str(Path(__file__).with_name("ipc_parent.py")), str(place))
    wait_until(lambda: program.out.read_text().count('"ready"') == 2 or program.over, program.story)
    owned.look(program.process.pid)
    assert owned.sockets == {str(place / "control"), str(place / "data")}, program.story()
    if how == "SIGTERM":
        for name in ("taskserver", "coordinator"):
            program.child(name).terminate()
        assert program.wait() == 0, program.story()
    else:
        program.signal(signal.SIGKILL)
        program.wait()
    nothing_left(owned, here, program)
    assert [*place.iterdir()] == []


def test_the_look_sees_whatever_is_left(here: Machine) -> None:
    """Of a program that leaves a process, a socket file and shared memory behind."""
    owned, path, memory = Owned(), here.place / "bound", Path(f"/dev/shm/opentinker-test-{os.getpid()}")
    program = here.python("-c", LEAVES_EVERYTHING, str(path), str(memory))
    wait_until(lambda: "\n" in program.out.read_text() or program.over, program.story)
    owned.look(program.process.pid)
    program.signal(signal.SIGKILL)
    program.wait()
    child = int(program.out.read_text())
    try:
        left = owned.left()
        assert [what for what in left if what.startswith(f"process {child} ")]
        assert str(path) in left and str(memory) in left
    finally:
        owned.end()
        memory.unlink(missing_ok=True)
