"""Keys through the real command line: who gets in, who does not and is told why, and that no secret gets out."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest
import structlog
from system_processes import SCRIPTED, Machine, Program, machine, wait_until

from coordinator.app.access import Access
from coordinator.app.bounded import SNAPSHOT
from coordinator.app.daemon import Daemon
from coordinator.core.coordinator import Coordinator
from tinker.protocol import ToAny, ToWatcher
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import Bye, EndRun, Heartbeat, Hello, Submit
from tinker.protocol.to_daemon import Drain, Status, Watch
from tinker.protocol.values import PeerName, Role, RunId
from tinker.runtime.authorized import AuthorizedKeys
from tinker.runtime.clock import MonotonicClock
from tinker.runtime.codec import decode, encode
from tinker.runtime.keys import create_keys, read_keys
from tinker.runtime.transport import (
    Connection,
    KeyPair,
    Security,
    Unauthorized,
    ZmqTransport,
    fingerprint,
    unpinned,
)

pytestmark = pytest.mark.timeout(240)
SMALL = ("--rounds", "2", "--set", "groups=2", "--set", "group_size=2", "--set", "evaluate_every=0")
ANYWHERE = "tcp://0.0.0.0:0"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def make_keys(place: Path, *names: str) -> Path:
    directory = place / "keys"
    for name in names:
        create_keys(name, directory)
    return directory


def authorize(place: Path, *lines: tuple[str, str]) -> Path:
    """A file in which each (role, name of a key [options]) has a line."""
    file = place / "authorized"
    texts = [f"{read_keys(place / 'keys' / f'{rest.split()[0]}.key').public} {role} {rest}" for role, rest in lines]
    file.write_text("# who may connect\n\n" + "\n".join(texts) + "\n")
    return file


def test_a_run_between_holders_of_keys_and_no_secret_anywhere(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also case M8: nothing listens but what is listed, and every listening socket is behind keys."""
    keys = make_keys(here.place, "hub", "server", "ann")
    listed = authorize(here.place, ("taskserver", "server"), ("host", "ann runs=run-*"))
    coordinator = here.start(
        "coordinator", "--bind", ANYWHERE, "--key", str(keys / "hub.key"), "--authorized", str(listed)
    )
    said = coordinator.ready()
    address = said.partition("#")[0].replace("0.0.0.0", "127.0.0.1")
    server = here.start(
        "taskserver", "--coordinator", address, "--server-key", str(keys / "hub.pub"), "--key", str(keys / "server.key"),
        *SCRIPTED, "--authorized", str(listed), "--data", "tcp://127.0.0.1:0",
    )  # fmt: skip
    server.ready()
    assert listening(coordinator) == 1
    assert listening(server) == 1
    with monkeypatch.context() as environment:
        environment.setenv("OPENTINKER_KEY", str(keys / "ann.key"))
        environment.setenv("OPENTINKER_SERVER_KEY", str(keys / "hub.pub"))
        run = here.start("run", "guess", "--coordinator", address, *SMALL, "--out", "run")
    assert run.wait() == 0, run.story()
    assert here.exit()["reason"] == "finished"
    other = here.start(
        "run", "guess", "--coordinator", said.replace("0.0.0.0", "127.0.0.1"), *SMALL, "--out", "mine", "--key", str(keys / "ann.key"),
    )  # fmt: skip
    assert other.wait() == 1, other.story()
    assert "may not submit run 'mine-" in here.exit("mine")["detail"]
    for daemon in (server, coordinator):
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.story()
    secrets = [read_keys(file).secret.removeprefix("sec-") for file in keys.glob("*.key")]
    for file in here.place.rglob("*"):
        if file.is_file() and file.suffix != ".key":
            text = file.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in text or bytes.fromhex(secret) in text], file


def listening(program: Program) -> int:
    """TCP sockets of the process that listen."""
    return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process(program.process.pid).net_connections("tcp"))


def test_an_unknown_key_is_told_and_the_log_names_its_fingerprint(here: Machine) -> None:
    keys = make_keys(here.place, "hub", "eve", "ann")
    listed = authorize(here.place, ("host", "ann"))
    coordinator = here.start(
        "coordinator", "--bind", ANYWHERE, "--key", str(keys / "hub.key"), "--authorized", str(listed)
    )
    address = coordinator.ready().replace("0.0.0.0", "127.0.0.1")
    eve = here.start("run", "guess", "--coordinator", address, *SMALL, "--out", "run", "--key", str(keys / "eve.key"))
    assert eve.wait() == 3, eve.story()
    assert "does not accept our key" in here.exit()["detail"]
    name = fingerprint(read_keys(keys / "eve.key").public)
    wait_until(lambda: name in coordinator.err.read_text(), coordinator.story)


@pytest.mark.parametrize(
    "what", ["no keys", "key only", "secret in argv", "readable secret", "bad line", "missing key"]
)
def test_a_coordinator_refuses_to_start_unsafely_and_says_what_to_do(here: Machine, what: str) -> None:
    keys = make_keys(here.place, "hub")
    listed = authorize(here.place)
    secret = read_keys(keys / "hub.key").secret
    options, says = {
        "no keys": ([], "opentinker keys new"),
        "key only": (["--key", str(keys / "hub.key")], "give both"),
        "secret in argv": (["--key", secret, "--authorized", str(listed)], "make a new one"),
        "readable secret": (["--key", str(keys / "hub.key"), "--authorized", str(listed)], "chmod 600"),
        "bad line": (
            ["--key", str(keys / "hub.key"), "--authorized", str(listed)],
            f"{listed}, line 2: the first word",
        ),
        "missing key": (["--key", "nowhere.key", "--authorized", str(listed)], "cannot read nowhere.key"),
    }[what]
    if what == "readable secret":
        (keys / "hub.key").chmod(0o640)
    if what == "bad line":
        listed.write_text(f"# who\n{secret} host ann\n")
    program = here.start("coordinator", "--bind", ANYWHERE, *options)
    assert program.wait() == 2, program.story()
    assert says in program.err.read_text()
    assert "Traceback" not in program.err.read_text()
    assert secret not in program.err.read_text() + program.out.read_text()


def test_an_ipc_socket_needs_a_directory_that_only_we_can_enter(here: Machine) -> None:
    directory = here.place / "open"
    directory.mkdir(mode=0o755)
    program = here.start("coordinator", "--bind", f"ipc://{directory}/socket")
    assert program.wait() == 2
    assert f"say `chmod 700 {directory}`" in program.err.read_text()
    directory.chmod(0o700)
    again = here.start("coordinator", "--bind", f"ipc://{directory}/socket")
    assert again.ready() == f"ipc://{directory}/socket"


def test_keys_are_made_once_with_private_modes_and_shown_without_the_secret(here: Machine) -> None:
    made = here.start("keys", "new", "ann", "--dir", "keys", "--role", "host,viewer")
    assert made.wait() == 0, made.story()
    secret = read_keys(here.place / "keys/ann.key").secret
    assert re.fullmatch(r"pub-[0-9a-f]{64} host,viewer ann\n", made.out.read_text())
    assert stat.S_IMODE((here.place / "keys/ann.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((here.place / "keys").stat().st_mode) == 0o700
    again = here.start("keys", "new", "ann", "--dir", "keys")
    shown = here.start("keys", "show", "--dir", "keys")
    assert (again.wait(), shown.wait()) == (2, 0)
    assert "exists already" in again.err.read_text()
    assert read_keys(here.place / "keys/ann.key").secret == secret
    assert read_keys(here.place / "keys/ann.key").public in shown.out.read_text()
    assert secret not in "".join(each.out.read_text() + each.err.read_text() for each in (made, again, shown))


# --- one daemon in this process ---


@asynccontextmanager
async def daemon(security: Security | None = None, authorized: AuthorizedKeys | None = None) -> AsyncIterator[Daemon]:
    listener = ZmqTransport(security).listen("tcp://127.0.0.1:0")
    made = Daemon(Coordinator(PeerName("hub")), listener, MonotonicClock(), access=Access(listener, authorized))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.serve)
            yield made
            made.stop()


@asynccontextmanager
async def protected(place: Path, *lines: tuple[str, str]) -> AsyncIterator[Daemon]:
    hub = read_keys(make_keys(place, "hub", "ann", "bob", "spy") / "hub.key")
    authorized = AuthorizedKeys.read(authorize(place, *lines))
    async with daemon(Security(hub, authorized), authorized) as made:
        yield made


def holding(place: Path, name: str) -> KeyPair:
    return read_keys(place / "keys" / f"{name}.key")


async def told(connection: Connection, message: object, expected: object = ToAny) -> object:
    connection.send(encode(message))
    return decode(await connection.receive(), expected)


@pytest.mark.parametrize(
    ("role", "name", "says"),
    [
        (Role.HOST, "bob", "may not take the name 'bob'; take 'ann', or one that begins with 'ann-'"),
        (Role.HOST, "annette", "may not take the name 'annette'"),
        (Role.OPERATOR, "ann", "is for host, player, not for operator"),
        (Role.HOST, "ann", ""),
        (Role.PLAYER, "ann-7", ""),
    ],
)
async def test_a_member_is_what_its_key_says(tmp_path: Path, role: Role, name: str, says: str) -> None:
    """Fault case 35."""
    async with protected(tmp_path, ("host,player", "ann")) as hub:
        connection = ZmqTransport(Security(holding(tmp_path, "ann"))).connect(hub.listener.address)
        answer = await told(connection, Hello(role, PeerName(name), "here", 1))
        await connection.aclose()
        assert isinstance(answer, Refused if says else Welcome)
        assert not isinstance(answer, Refused) or says in answer.reason
        assert hub.refusals["Hello", "not with this key"] == bool(says)


@pytest.mark.parametrize("role", Role)
async def test_a_key_may_look_and_drain_as_its_role_says_and_no_other(tmp_path: Path, role: Role) -> None:
    """No Hello is needed for it, and with it nobody can do anything else. What is refused is refused by name."""
    async with protected(tmp_path, (role, "ann")) as hub:
        connection = ZmqTransport(Security(holding(tmp_path, "ann"))).connect(hub.listener.address)
        looked = await told(connection, Watch(), ToWatcher)
        if role == Role.PLAYER:
            assert isinstance(looked, Refused) and looked.what == "Watch"
            assert (
                "(ann) is for player, which may not send this; host, taskserver, operator, viewer may" in looked.reason
            )
        else:
            assert isinstance(looked, Status)
            assert SNAPSHOT.validate_json(looked.snapshot).coordinator == "hub"
        ended = await told(connection, EndRun(RunId("run"), "because"))
        assert isinstance(ended, Refused) and "you are no member" in ended.reason
        drained = await told(connection, Drain(), ToWatcher)
        if role == Role.OPERATOR:
            assert drained == Draining("an operator has told the coordinator to stop")
            while hub.serving:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert hub.core.draining
        else:
            assert isinstance(drained, Refused) and drained.what == "Drain"
            assert f"is for {role}, which may not send this; operator may" in drained.reason
            assert hub.serving and not hub.core.draining
            assert hub.refusals["Drain", "not with this key"] == 1
        await connection.aclose()


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_who_only_asks_cannot_become_a_member(tmp_path: Path, role: Role) -> None:
    async with protected(tmp_path, (f"host,{role}", "ann")) as hub:
        connection = ZmqTransport(Security(holding(tmp_path, "ann"))).connect(hub.listener.address)
        answer = await told(connection, Hello(role, PeerName("ann"), "here", 1))
        assert isinstance(answer, Refused) and f"{role} 'ann' is no member" in answer.reason
        assert isinstance(await told(connection, Hello(Role.HOST, PeerName("ann"), "here", 1)), Welcome)
        drained = await told(
            connection, Drain(), ToWatcher
        )  # the key may, if its line says operator; this member may not
        assert isinstance(drained, Refused) and not hub.core.draining
        connection.send(encode(Bye("done")))
        await connection.aclose()


async def test_a_key_that_is_removed_is_cut_off_and_one_whose_line_changed_is_what_it_now_is(tmp_path: Path) -> None:
    async with protected(tmp_path, ("host", "ann"), ("host", "bob")) as hub:
        assert hub.access is not None and hub.access.authorized is not None
        ann, bob = (ZmqTransport(Security(holding(tmp_path, n))).connect(hub.listener.address) for n in ("ann", "bob"))
        for name, connection in (("ann", ann), ("bob", bob)):
            assert isinstance(await told(connection, Hello(Role.HOST, PeerName(name), "here", 1)), Welcome)
        authorize(tmp_path, ("host", "bob runs=none-*"))
        assert hub.access.authorized.changed() and hub.access.authorized.reload()
        hub.listener.recheck()
        with pytest.raises(Unauthorized):
            await ann.receive()
        assert isinstance(await told(bob, Heartbeat()), Welcome)
        assert set(hub.core.roster.peers) == {"bob"}
        (tmp_path / "authorized").write_text("nonsense\n")
        assert hub.access.authorized.changed() and not hub.access.authorized.reload()
        hub.listener.recheck()
        assert isinstance(await told(bob, Heartbeat()), Welcome)
        for connection in (ann, bob):
            await connection.aclose()


@pytest.mark.parametrize("how", ["hangup", "changed file"])
def test_a_running_coordinator_reads_its_authorized_file_again(here: Machine, how: str) -> None:
    keys = make_keys(here.place, "hub", "server", "ann")
    listed = authorize(here.place, ("taskserver", "server"), ("host", "ann"))
    coordinator = here.start(
        "coordinator", "--bind", "tcp://127.0.0.1:0", "--key", str(keys / "hub.key"), "--authorized", str(listed)
    )
    address = coordinator.ready()
    server = here.start(
        "taskserver", "--coordinator", address, "--key", str(keys / "server.key"), *SCRIPTED, "--authorized", str(listed)
    )  # fmt: skip
    server.ready()
    stamp = listed.stat()
    authorize(here.place, ("host", "ann"))
    if how == "hangup":
        os.utime(listed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        coordinator.signal(signal.SIGHUP)
    wait_until(lambda: "its key is not authorized any more" in coordinator.err.read_text(), coordinator.story)
    assert 'event="authorized keys read"' in coordinator.err.read_text()
    assert server.wait() == 2, server.story()
    assert "does not accept our key" in server.err.read_text()
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0, coordinator.story()


async def test_a_run_that_the_key_does_not_allow_is_refused(tmp_path: Path) -> None:
    from tinker.protocol.to_coordinator import AgentSpec, Enlist, RunSpec
    from tinker.protocol.values import AgentName, PolicyName

    async with protected(tmp_path, ("host", "ann runs=exp-*,try-?")) as hub:
        connection = ZmqTransport(Security(holding(tmp_path, "ann"))).connect(hub.listener.address)
        assert isinstance(await told(connection, Hello(Role.HOST, PeerName("ann"), "here", 1)), Welcome)
        agents = (AgentSpec(AgentName("a"), PolicyName("a")),)
        spec = RunSpec(RunId("prod-1"), "guess", agents, 1, 1, 1, 0, 0)
        answer = await told(connection, Submit(spec))
        assert isinstance(answer, Refused)
        assert "may not submit run 'prod-1', only exp-*, try-?" in answer.reason
        answer = await told(connection, Enlist(RunId("prod-1"), "guess", 1))
        assert isinstance(answer, Refused)
        assert "may not play for run 'prod-1', only for exp-*, try-?" in answer.reason
        assert not hub.core.queue
        connection.send(encode(Submit(RunSpec(RunId("exp-1"), *(getattr(spec, f) for f in RunSpec.__slots__[1:])))))
        await connection.receive()
        assert set(hub.core.queue) == {"exp-1"}
        await connection.aclose()


# --- the live socket ---


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def junk(marker: Path, rng: random.Random) -> list[bytes]:
    """1,000 frames that are no messages."""
    good = encode(Hello(Role.HOST, PeerName("x"), "here", 1))
    frames = [pickle.dumps(Marker(marker), protocol) for protocol in range(6)]
    frames += [good[:length] for length in range(len(good))]
    frames += [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff" + bytes(50), b"\x91" * 100_000, b"\x82\x01\x02\x03\x04"]
    frames += [b"\x92\x63\xa9Heartbeat", b"\x92\x01\xb4WORDS-OF-A-STRANGER!!", b"", b"__import__('os').mkdir('x')"]
    return frames + [rng.randbytes(rng.choice((1, 20, 300, 5000))) for _ in range(1000 - len(frames))]


@pytest.mark.parametrize("keys", ["no keys", "keys"])
async def test_junk_on_the_live_socket_harms_nobody_and_is_counted(
    tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case M9 and fault cases 33 and 34: while 1,000 frames of junk come, a good client is served all along."""
    marker, rng = tmp_path / "marker", random.Random(1)
    lines = (("host", "ann"), ("host", "spy"))
    async with protected(tmp_path, *lines) if keys == "keys" else daemon() as hub:
        good, bad = (
            ZmqTransport(Security(holding(tmp_path, name)) if keys == "keys" else None).connect(hub.listener.address)
            for name in ("ann", "spy")
        )
        assert isinstance(await told(good, Hello(Role.HOST, PeerName("ann"), "here", 1)), Welcome)
        frames = junk(marker, rng)
        for number, frame in enumerate(frames):
            bad.send(frame)
            answer = decode(await bad.receive(), ToAny)
            assert isinstance(answer, Refused), frame[:40]
            if number % 50 == 0:
                assert isinstance(await told(good, Heartbeat()), Welcome)
        assert hub.refusals["frame", "malformed"] == len(frames)
        strangers(unpinned(hub.listener.address)[0], rng)
        assert isinstance(await told(good, Heartbeat()), Welcome)
        while not sum(number for (what, _), number in hub.refusals.items() if what == "connection"):  # noqa: ASYNC110
            await anyio.sleep(0.02)
        assert set(hub.core.roster.peers) == {"ann"}
        for connection in (good, bad):
            await connection.aclose()
    assert not marker.exists()
    heard = capsys.readouterr()
    assert "WORDS-OF-A-STRANGER" not in heard.out + heard.err


def strangers(address: str, rng: random.Random) -> None:
    """Whoever comes without speaking our protocol: 50 connections with random bytes, and one that declares a huge frame."""
    host, port = address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for first in [rng.randbytes(rng.randrange(200)) for _ in range(50)] + [greeting + b"\x02" + b"\xff" * 8]:
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(first)


async def test_an_oversized_frame_is_refused_named_and_costs_its_sender_only_its_own_connection(tmp_path: Path) -> None:
    """Case 33: 100 MB, from somebody with a key."""
    from tinker.runtime.transport import Limits

    async with protected(tmp_path, ("host", "ann"), ("host", "spy")) as hub:
        good = ZmqTransport(Security(holding(tmp_path, "ann"))).connect(hub.listener.address)
        bad = ZmqTransport(Security(holding(tmp_path, "spy"))).connect(
            hub.listener.address, Limits(frame=128 * 1024 * 1024)
        )
        assert isinstance(await told(good, Hello(Role.HOST, PeerName("ann"), "here", 1)), Welcome)
        assert isinstance(await told(bad, Hello(Role.HOST, PeerName("spy"), "here", 1)), Welcome)
        with structlog.testing.capture_logs() as lines:
            bad.send(b"secret" * 17_000_000)
            while hub.core.roster.peers[PeerName("spy")].closed is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert isinstance(await told(good, Heartbeat()), Welcome)
        assert hub.refusals["frame", "too large"] == 1
        await good.aclose()
        await bad.aclose()
    (refused,) = [line for line in lines if line["event"] == "refused"]
    assert (refused["what"], refused["member"]) == ("frame", "spy")
    assert refused["reason"] == "a frame of 102000000 bytes; at most 16777216 fit"
    assert "secret" not in str(lines)


# --- the tree ---

ROOT = Path(__file__).parents[2]
TREE = [f for p in ("tinker", "agents", "coordinator", "envs", "scenarios") for f in (ROOT / p).rglob("*.py")]
LISTENS = {  # every place that opens a listening socket, and what keeps strangers out (case M8)
    "coordinator/app/processes.py": "control and data listeners: loopback, or keys (check_listen)",
    "coordinator/web/pages.py": "health, metrics and status: loopback only (check_loopback)",
    "tinker/runtime/transport/zmq.py": "the ROUTER behind both",
    "tinker/runtime/transport/zap.py": "inproc: inside one context",
}
OPENS = re.compile(
    r"(?:raw|socket|sock|server)\.bind\(|[tT]ransport\S*\.listen\(|start_server|create_server|create_tcp_listener|HTTPServer|bind_to_random"
)
EXECUTES = re.compile(
    r"\b(pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib|yaml)\b|\b(eval|exec)\(|recv_pyobj|send_pyobj|allow_pickle=True"
)


def test_every_place_that_listens_is_known() -> None:
    found = {str(f.relative_to(ROOT)) for f in TREE if any(OPENS.search(line) for line in code(f))}
    assert found - set(LISTENS) == set(), "a new listener: protect it, then list it"
    assert set(LISTENS) - found <= {"coordinator/web/pages.py"}


RUNS_TEXT = {  # every place that runs or pickles anything, what, and how often: of our own making, never received
    ("tinker/runtime/codec.py", "eval("): 1,  # encoders, of the names of our own classes' fields
    ("tinker/protocol/making.py", "exec("): 1,  # constructors, the same
}
WRITES_PICKLES = {"tinker/engines/sglang/wire.py"}  # SGLang reads tensors in no other form; nothing is read there
READS_PICKLES = re.compile(r"\b(pickle\.loads?|Unpickler|_Unpickler|_loads?)\b")


def test_nothing_that_was_received_can_be_executed() -> None:
    """Case M9: no unpickling anywhere; torch loads weights only."""
    found: Counter[tuple[str, str]] = Counter()
    for file in TREE:
        name = str(file.relative_to(ROOT))
        for line in code(file):
            for match in EXECUTES.finditer(re.sub(r"\w+\.eval\(\)", "", line)):
                if name not in WRITES_PICKLES:
                    found[name, match.group()] += 1
    assert dict(found) == RUNS_TEXT
    assert [line for name in WRITES_PICKLES for line in code(ROOT / name) if READS_PICKLES.search(line)] == []
    loads = [line for f in TREE for line in code(f) if "torch.load(" in line]
    assert [line for line in loads if "weights_only=True" not in line] == []


def code(file: Path) -> list[str]:
    """Lines without comments (strings stay: better one finding too many)."""
    return [
        line.split("  #")[0]
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]


def test_the_pages_of_a_coordinator_are_for_this_machine_only(here: Machine) -> None:
    program = here.start("coordinator", "--bind", "tcp://127.0.0.1:0", "--http", "0.0.0.0:0")
    assert program.wait() == 2
    assert "refusing to serve pages on 0.0.0.0:0" in program.err.read_text()


def test_a_ready_line_names_the_public_key(here: Machine) -> None:
    keys = make_keys(here.place, "hub")
    program = here.start(
        "coordinator", "--bind", ANYWHERE, "--key", str(keys / "hub.key"), "--authorized", str(authorize(here.place))
    )
    address = program.ready()
    assert address.endswith("#" + read_keys(keys / "hub.key").public)
    assert json.loads(program.out.read_text())["ready"] == address
