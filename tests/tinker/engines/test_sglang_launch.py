"""Servers of our own: started, watched, started again, and never left behind. The stub stands in for SGLang, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tinker.engines.conformance import request, version
from tests.tinker.engines.sglang_fixtures import QUICKLY, adapter, states, until
from tinker.engines.engine import EngineError
from tinker.engines.scripted import ScriptedEngine
from tinker.engines.sglang import Launch, Servers, SglangEngine
from tinker.engines.sglang.launch import command, environment
from tinker.engines.sglang.replica import State

STUB = Path(__file__).with_name("sglang_stub.py")
WARDEN = Path(__file__).parents[3] / "tinker/engines/sglang/warden.py"


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], str]:
    """`python("...")` is an interpreter that runs this shell text; "$@" are the server's options."""

    def made(text: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nshift 2\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return made


def served(python: str, **settings: Any) -> SglangEngine:
    launch = Launch(python=python, **{"grace": 2.0, "ready": 30.0, **settings})
    return SglangEngine(Servers(launch=launch, **QUICKLY), ScriptedEngine(), model=Path("/models/base"), probe=False)


def descendants() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


async def test_servers_are_started_serve_and_are_gone_afterwards(python: Callable[[str], str]) -> None:
    before = len(descendants())
    async with served(python(f'exec {sys.executable} {STUB} "$@"'), replicas=2) as engine:
        assert states(engine) == [State.SERVING] * 2
        await engine.load(version("ann"), adapter())
        assert (await engine.generate(request(under=version("ann")))).ids
        children = descendants()
        assert len(children) == before + 4  # two wardens, two servers
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


async def test_a_server_that_is_killed_is_started_again_and_gets_its_adapters(python: Callable[[str], str]) -> None:
    async with served(python(f'exec {sys.executable} {STUB} "$@"')) as engine:
        await engine.load(version("ann"), adapter())
        (server,) = [
            each for each in descendants() if STUB.name in " ".join(each.cmdline()) and "-I" not in each.cmdline()
        ]
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: states(engine) != [State.SERVING])
        assert (await engine.generate(request(under=version("ann")))).version == version("ann")


async def test_a_server_that_dies_again_and_again_is_given_up_with_its_last_words(python: Callable[[str], str]) -> None:
    async with served(python(f'exec {sys.executable} {STUB} "$@"'), restarts=0) as engine:
        for each in descendants():
            if STUB.name in " ".join(each.cmdline()) and "-I" not in each.cmdline():
                os.kill(each.pid, signal.SIGKILL)
        await until(lambda: states(engine) == [State.GONE])
        with pytest.raises(EngineError, match=r"(?s)no SGLang server is left.*died 1 times.*SIGKILL.*ready"):
            await engine.generate(request())


async def test_a_server_that_cannot_start_says_why(python: Callable[[str], str]) -> None:
    with pytest.raises(EngineError, match=r"(?s)not every SGLang server came up.*exit code 7.*no such model"):
        async with served(python("echo no such model; exit 7")):
            pass
    assert not [each for each in descendants() if "warden.py" in " ".join(each.cmdline())]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch(python="no/such/python"), "make sglang"),
        (Launch(python=sys.executable, ports=(1, 2)), "1 replicas and 2 ports"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_is_started(launch: Launch, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SglangEngine(Servers(launch=launch), ScriptedEngine())


def test_either_addresses_or_how_to_launch() -> None:
    for servers in (Servers(), Servers(("http://127.0.0.1:1",), Launch(python=sys.executable))):
        with pytest.raises(EngineError, match="either"):
            SglangEngine(servers, ScriptedEngine())


def test_a_server_never_inherits_what_would_change_it() -> None:
    ours = {"PATH": "/bin", "PYTHONPATH": "/x", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "OPENTINKER_SGLANG_KEY": "s"}
    kept = environment(Launch(threads=3), ours)
    assert kept["PATH"] == "/bin" and kept["OMP_NUM_THREADS"] == "3"
    assert not kept.keys() & {"PYTHONPATH", "SGLANG_RETURN_ORIGINAL_LOGPROB", "OPENTINKER_SGLANG_KEY"}


def test_other_devices_use_sglangs_own_launcher_and_arguments_may_name_the_replica() -> None:
    launch = Launch(device="cuda", arguments=("--base-gpu-id", "{replica}"))
    words = command(launch, Path("/models/base"), 31000, 2)
    assert words[2:4] == ["-m", "sglang.launch_server"] and words[-2:] == ["--base-gpu-id", "2"]
    assert "torch_native" not in words and "--enable-lora" in words


# --- the warden ---

TWO = "import os,time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"


def warden(program: str, grace: str = "0.2") -> tuple[subprocess.Popen[str], list[int]]:
    """A warden with a server of two processes, and their pids."""
    process = subprocess.Popen(
        [sys.executable, "-I", str(WARDEN), grace, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, [int(process.stdout.readline()) for _ in range(2)]


def gone(pids: list[int]) -> None:
    """Wait until they are; the test's own time limit ends it."""
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


@pytest.mark.parametrize("stubborn", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
@pytest.mark.parametrize("how", ["close", "term"])
def test_the_warden_ends_all_of_it_when_it_is_told_to(how: str, stubborn: str) -> None:
    process, pids = warden(stubborn + TWO)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close() if how == "close" else process.terminate()
    code = process.wait()
    gone(pids)
    assert code == 128 + (signal.SIGKILL if stubborn else signal.SIGTERM)
    process.stdout.close()
    process.stdin.close()


def test_nothing_is_left_when_the_warden_itself_is_killed() -> None:
    """The kernel kills the server; a server's own children watch their parent, as SGLang's do."""
    process, pids = warden("import os,time; os.write(1, b'%d\\n%d\\n' % (os.getpid(), os.getpid())); time.sleep(600)")
    process.kill()
    process.wait()
    gone(pids)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_nothing_is_left_when_whoever_started_it_is_killed() -> None:
    code = (
        "import subprocess,sys; p = subprocess.Popen([sys.executable, '-I', sys.argv[1], '0.2', sys.executable, '-c', sys.argv[2]],"
        "stdin=subprocess.PIPE); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(WARDEN), TWO], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    gone(pids)
    parent.stdout.close()


def test_the_warden_ends_as_its_server_does() -> None:
    words = [sys.executable, "-I", str(WARDEN), "1", sys.executable, "-c", "exit(7)"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait() == 7
