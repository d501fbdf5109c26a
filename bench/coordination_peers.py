"""The processes of `bench/coordination.py`: the real daemon with a host and a task server that do nothing but answer, and the raw ZeroMQ
processes they are compared with.

    python bench/coordination_peers.py ROLE JSON

Each prints one line when it is ready, and one for each line it reads (a count: how often to do it), with what it measured.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from coordinator.app import processes
from coordinator.app.daemon import Daemon
from coordinator.app.logs import log_to_stderr
from coordinator.app.processes import CoordinatorSettings, run_coordinator
from tinker.client import Client
from tinker.protocol import ToAny, ToCoordinator, ToHost, ToTaskserver
from tinker.protocol.making import maker
from tinker.protocol.operations import Attach, Published
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import (
    AgentSpec,
    Arrivals,
    Arrive,
    EpisodeEnded,
    Generated,
    Heartbeat,
    Held,
    Hello,
    Loaded,
    OpenTurn,
    Operate,
    RunSpec,
    SeatRequest,
    Submit,
    WorkerDone,
    WorkerOffer,
)
from tinker.protocol.to_host import Admitted, Opened, OperationDone, SeatResult, TurnClosed
from tinker.protocol.to_taskserver import Generate, Load, Release, Work
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Edge,
    Ended,
    EpisodeId,
    Finish,
    LoraSpec,
    ModelCard,
    OpId,
    PeerName,
    Phase,
    PolicyName,
    PolicyVersion,
    PoolKind,
    Role,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
    pack_floats,
    pack_ids,
)
from tinker.runtime.actor import Actor, ActorSystem
from tinker.runtime.bulk import machine_id
from tinker.runtime.clock import MonotonicClock
from tinker.runtime.codec import decode, encode
from tinker.runtime.transport import Arrival, ZmqTransport

TABLES, PROMPT, ANSWER = 64, 200, 50
MACHINE = machine_id()  # so that the coordinator sees the end of our processes
SEATS = (SeatName("first"), SeatName("second"))
IDS, LOGPROBS = pack_ids(range(ANSWER)), pack_floats([-1.5] * ANSWER)
SAMPLING = Sampling(ANSWER, 1.0, 4711)
ROLLOUT, UPDATE, START, END = Phase.ROLLOUT, Phase.UPDATE, Edge.START, Edge.END
FOREVER = 1_000_000  # rounds


def answer(**measured: object) -> None:
    print(json.dumps(measured), flush=True)


def serve_counts(work: Callable[[int], dict[str, object] | None]) -> None:
    """Do it as often as each line says."""
    for line in sys.stdin:
        began = time.perf_counter()
        extra = work(int(line)) or {}
        answer(seconds=time.perf_counter() - began, **extra)


# --- the real ones ---


def daemon(profile: str = "", journal: str = "", address: str = "tcp://127.0.0.1:0") -> None:
    log_to_stderr()
    settings = CoordinatorSettings(address, "coordinator", journal=Path(journal) if journal else None)
    if not profile:
        asyncio.run(run_coordinator(settings))
        return
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(asyncio.run, run_coordinator(settings))
    profiler.dump_stats(profile)


class Bare(Daemon):
    """Our transport and codec and nothing else: turns go through without a gate, a version, a worker that is chosen, or a fence. What is
    left is what Python takes to receive, check, write and send these messages."""

    def _arrived(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, tuple):
            match decode(arrival[1], ToCoordinator):
                case OpenTurn() as asked:
                    worker, server = WorkerName("server/rollout"), self.keys[PeerName("server")]
                    for each in asked.requests:
                        request = maker(Generate)(
                            asked.turn, each.seat, worker, each.policy, each.prompt, each.sampling, asked.deadline
                        )
                        self._outgoing.append((server, request))
                    return
                case Generated() as done:
                    result = maker(SeatResult)(
                        done.seat,
                        done.worker,
                        done.ids,
                        done.logprobs,
                        done.finish,
                        done.version,
                        done.busy,
                        "",
                        done.engine,
                    )
                    host, index = self.keys[PeerName("host of turns")], done.turn.episode.index
                    if index in HALF:
                        self._outgoing.append((host, TurnClosed(done.turn, (HALF.pop(index), result))))
                    else:
                        HALF[index] = result
                    return
        super()._arrived(arrival, now)


HALF: dict[int, SeatResult] = {}


def bare_daemon() -> None:
    processes.Daemon = Bare  # type: ignore[misc]
    daemon()


async def taskserver(address: str) -> None:
    """Answers at once: one rollout worker, one update worker."""
    connection = ZmqTransport().connect(address)
    workers = tuple(
        WorkerOffer(WorkerName(f"server/{kind}"), kind, "none", 1) for kind in (PoolKind.ROLLOUT, PoolKind.UPDATE)
    )
    card = ModelCard("none", "digest", "tokenizer", 1000, 4096, (0,))
    hello = Hello(Role.TASKSERVER, PeerName("server"), MACHINE, os.getpid(), workers, card, "data", b"tokenizer")
    connection.send(encode(hello))
    ready = False
    holding: dict[tuple[RunId, WorkerName, PolicyVersion], Held] = {}

    async def stay() -> None:
        while True:
            await anyio.sleep(0.25)
            connection.send(encode(Heartbeat()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stay, name="stay")
        while True:
            for frame in await connection.receive_many():
                match decode(frame, ToTaskserver | ToAny):
                    case Generate() as asked:
                        place = asked.turn, asked.seat, asked.worker
                        connection.send(encode(Generated(*place, IDS, LOGPROBS, Finish.LENGTH, asked.policy)))
                    case Refused(stranger=True):
                        held = tuple(holding.values())
                        hello = replace(hello, incarnation=hello.incarnation + 1, holding=held)
                        connection.send(encode(hello))
                    case Load() as load:
                        holding[load.run, load.worker, load.version] = Held(
                            load.run, load.worker, load.version, load.adapter.digest
                        )
                        connection.send(encode(Loaded(load.run, load.worker, load.version, load.adapter.digest)))
                    case Work() as work:
                        published = Published(PolicyVersion(work.policy, 0), BlobRef("b", "d", 1, "here", "/b", ""))
                        connection.send(encode(WorkerDone(work.run, work.op, work.worker, published)))
                    case Release():
                        answer(released=time.monotonic())
                    case Welcome() if not ready:
                        ready = True
                        answer(ready=True)


def run_spec(run: str, agents: int, episodes: int) -> RunSpec:
    named = tuple(AgentSpec(AgentName(f"agent{k:04}"), PolicyName(f"policy{k:04}")) for k in range(agents))
    return RunSpec(RunId(run), "bench", named, FOREVER, episodes, 1, 0, 0)


@asynccontextmanager
async def joined(address: str, spec: RunSpec) -> AsyncIterator[Client]:
    """A host whose run is admitted and whose agents are attached."""
    hello = Hello(Role.HOST, PeerName(f"host of {spec.run}"), MACHINE, os.getpid())
    async with (
        Client(ZmqTransport().connect(address), hello, MonotonicClock()) as client,
        anyio.create_task_group() as tg,
    ):
        tg.start_soon(client.serve, name="serve")
        await client.joined()
        await client.submit(spec)
        for agent in spec.agents:
            await client.operate(attach(spec, agent))
        yield client
        tg.cancel_scope.cancel()


def attach(spec: RunSpec, agent: AgentSpec) -> Operate:
    return Operate(spec.run, OpId(f"attach {agent.name}"), agent.name, agent.policy, Attach(LoraSpec()))


async def serve_counts_async(work: Callable[[int], Any]) -> None:
    answer(ready=True)
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        began = time.perf_counter()
        await work(int(line))
        answer(seconds=time.perf_counter() - began)


async def arrive(client: Client, spec: RunSpec, round: int, phase: Phase, edge: Edge, coalesced: bool) -> None:
    if coalesced:
        names = tuple(agent.name for agent in spec.agents)
        await client.arrive(Arrivals(spec.run, round, phase, edge, names, (0,) * len(names)))
    for agent in spec.agents if not coalesced else ():
        await client.arrive(Arrive(spec.run, round, phase, edge, agent.name, 0))
    await client.opened(round, phase, edge)


def open_turn(spec: RunSpec, episode: EpisodeId, number: int) -> OpenTurn:
    """Two seats with contexts of `PROMPT` ids, as a table of two agents asks."""
    prompt = pack_ids(range(PROMPT))
    requests = tuple(
        SeatRequest(seat, PolicyVersion(agent.policy, 0), prompt, SAMPLING)
        for seat, agent in zip(SEATS, spec.agents, strict=True)
    )
    return OpenTurn(TurnId(spec.run, episode, number), requests, 120.0)


async def turns(address: str) -> None:
    """`TABLES` episodes at once, each as many turns as it is told."""
    spec = run_spec("turns", 2, TABLES)
    async with joined(address, spec) as client:
        await arrive(client, spec, 1, ROLLOUT, START, False)
        played = 0

        async def table(index: int, count: int) -> None:
            for number in range(played, played + count):
                await client.turn(open_turn(spec, EpisodeId(1, ROLLOUT, index), number))

        async def work(count: int) -> None:
            nonlocal played
            async with anyio.create_task_group() as tables:
                for index in range(TABLES):
                    tables.start_soon(table, index, count)
            played += count

        await serve_counts_async(work)


async def rounds(address: str, agents: int, episodes: int = 1, coalesced: bool = True) -> None:
    """Whole rounds of one run: three barriers of all agents, and the end of the rollout."""
    spec = run_spec("rounds", agents, episodes)
    played = 0
    async with joined(address, spec) as client:

        async def work(count: int) -> None:
            nonlocal played
            for round in range(played + 1, played + count + 1):
                await arrive(client, spec, round, ROLLOUT, START, coalesced)
                for index in range(episodes):
                    await client.plays.receive()
                    client.account(EpisodeEnded(spec.run, EpisodeId(round, ROLLOUT, index), Ended.FINISHED))
                await client.opened(round, ROLLOUT, END)
                await arrive(client, spec, round, UPDATE, START, coalesced)
                await arrive(client, spec, round, UPDATE, END, coalesced)
            played += count

        await serve_counts_async(work)


class Many:
    """Many hosts in one process, each with a connection and a run of one agent, driven in step and without an event loop."""

    def __init__(self, address: str, count: int, name: str) -> None:
        context = zmq.Context()
        self.sockets = [dealer(context, address) for _ in range(count)]
        self.specs = [run_spec(f"{name}{k}", 1, 1) for k in range(count)]
        self.played = 0

    def all(self, make: Callable[[RunSpec], object], until: type) -> None:
        for socket, spec in zip(self.sockets, self.specs, strict=True):
            socket.send(encode(make(spec)))
        for socket in self.sockets:
            while not isinstance(decode(socket.recv(), ToHost | ToAny), until):
                pass

    def join(self) -> None:
        self.all(lambda spec: Hello(Role.HOST, PeerName(f"host {spec.run}"), MACHINE, os.getpid()), Welcome)
        self.all(Submit, Admitted)
        self.all(lambda spec: attach(spec, spec.agents[0]), OperationDone)

    def barriers(self, count: int) -> None:
        for round in range(self.played + 1, self.played + count + 1):
            self.all(lambda spec, r=round: arrival(spec, r, ROLLOUT, START), Opened)
            self.all(lambda spec, r=round: EpisodeEnded(spec.run, EpisodeId(r, ROLLOUT, 0), Ended.FINISHED), Opened)
            self.all(lambda spec, r=round: arrival(spec, r, UPDATE, START), Opened)
            self.all(lambda spec, r=round: arrival(spec, r, UPDATE, END), Opened)
        self.played += count

    def beat(self) -> None:
        self.all(lambda spec: Heartbeat(), Welcome)


def arrival(spec: RunSpec, round: int, phase: Phase, edge: Edge) -> Arrive:
    return Arrive(spec.run, round, phase, edge, spec.agents[0].name, 0)


def connections(address: str, count: int, name: str = "run") -> None:
    """As many hosts as told; each line plays that many rounds (four barriers). 0: only the first barrier, right after joining."""
    many = Many(address, count, name)
    many.join()
    answer(ready=True)
    serve_counts(many.barriers)


def storm(address: str, count: int, name: str) -> None:
    """A line: connect, join and pass a first barrier."""
    answer(ready=True)

    def work(_: int) -> None:
        many = Many(address, count, name)
        many.join()
        many.all(lambda spec: arrival(spec, 1, ROLLOUT, START), Opened)
        kept.append(many)

    kept: list[Many] = []
    serve_counts(work)


class Idle(Actor[str, str]):
    async def receive(self, message: str) -> str:
        return message


async def actors() -> None:
    """kB of resident memory for each idle actor."""

    async def work(count: int) -> None:
        async with ActorSystem() as system:
            warm = [system.spawn(f"warm{k}", Idle) for k in range(500)]
            await warm[-1].ask("hello", deadline=10)
            before = resident()
            refs = [system.spawn(f"actor{k}", Idle) for k in range(count)]
            await refs[-1].ask("hello", deadline=10)
            answer(kb=(resident() - before) / count / 1000)

    answer(ready=True)
    await work(int(await anyio.to_thread.run_sync(sys.stdin.readline)))


def resident(pid: int | str = "self") -> int:
    """Bytes of resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


# --- the raw ones: blocking loops, frames of the same sizes, nothing looked at ---


def router() -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    socket.set(zmq.BACKLOG, 4096)
    socket.bind("tcp://127.0.0.1:0")
    answer(ready=socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    return socket


def dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def raw_relay(codec: bool = False) -> None:
    """One frame of the host becomes two for the server, two of the server become one for the host. `codec`: it also decodes a message
    for each frame that comes, and encodes one for each that goes, of the right kind and size, and looks at nothing."""
    sizes = frame_sizes()
    to_server, to_host = bytes(sizes["Generate"]), bytes(sizes["TurnClosed"])
    socket = router()
    if codec:
        relay_messages(socket)
    host = server = b""
    while not (host and server):
        who, what = socket.recv(), socket.recv()
        host, server = (who, server) if what == b"host" else (host, who)
    answered = 0
    while True:
        who = socket.recv()
        socket.recv()
        if who == host:
            for _ in SEATS:
                socket.send(server, zmq.SNDMORE)
                socket.send(to_server)
            continue
        answered += 1
        if answered % len(SEATS) == 0:
            socket.send(host, zmq.SNDMORE)
            socket.send(to_host)


def relay_messages(socket: zmq.Socket[bytes]) -> None:
    """`raw_relay` with the codec."""
    asked, generate, generated, closed = messages_of_a_turn()
    opened, answered = encode(asked), encode(generated)
    host, done = b"", 0
    server = b""
    while not (host and server):
        who, what = socket.recv(), socket.recv()
        host, server = (who, server) if what == b"host" else (host, who)
    while True:
        who = socket.recv()
        socket.recv()
        if who == host:
            decode(opened, ToCoordinator)
            for _ in SEATS:
                socket.send(server, zmq.SNDMORE)
                socket.send(encode(generate))
            continue
        decode(answered, ToCoordinator)
        done += 1
        if done % len(SEATS) == 0:
            socket.send(host, zmq.SNDMORE)
            socket.send(encode(closed))


def messages_of_a_turn() -> tuple[OpenTurn, Generate, Generated, TurnClosed]:
    spec = run_spec("turns", 2, TABLES)
    asked = open_turn(spec, EpisodeId(1, ROLLOUT, TABLES - 1), 100)
    worker = WorkerName("server/rollout")
    request = asked.requests[0]
    generate = Generate(asked.turn, request.seat, worker, request.policy, request.prompt, request.sampling, 119.999)
    generated = Generated(asked.turn, request.seat, worker, IDS, LOGPROBS, Finish.LENGTH, request.policy)
    result = SeatResult(request.seat, worker, IDS, LOGPROBS, Finish.LENGTH, request.policy)
    return asked, generate, generated, TurnClosed(asked.turn, (result,) * len(SEATS))


def frame_sizes() -> dict[str, int]:
    """Bytes of the four messages of one turn."""
    return {type(message).__name__: len(encode(message)) for message in messages_of_a_turn()}


def raw_server(address: str) -> None:
    socket = dealer(zmq.Context(), address)
    socket.send(b"server")
    answer(ready=True)
    frame = bytes(frame_sizes()["Generated"])
    while True:
        socket.recv()
        socket.send(frame)


def raw_turns(address: str) -> None:
    socket = dealer(zmq.Context(), address)
    socket.send(b"host")
    answer(ready=True)
    frame = bytes(frame_sizes()["OpenTurn"])

    def work(count: int) -> None:
        for _ in range(TABLES):
            socket.send(frame)
        for left in range(count * TABLES, 0, -1):
            socket.recv()
            if left > TABLES:
                socket.send(frame)

    serve_counts(work)


ARRIVAL = bytes(len(encode(arrival(run_spec("rounds", 1, 1), 100, ROLLOUT, START))))


def opening(agents: int) -> bytes:
    """As many bytes as our `Opened` takes."""
    spec = run_spec("rounds", agents, 1)
    names, policies = zip(*[(agent.name, agent.policy) for agent in spec.agents], strict=True)
    said = Opened(spec.run, 100, ROLLOUT, START, names, (0.0,) * agents, policies, (0,) * agents)
    return bytes(len(encode(said)))


def raw_hub(counts: list[int]) -> None:
    """Opens after so many frames, one count after the other and around: one release for each connection that sent any."""
    releases = [opening(count if len(counts) > 1 else 1) for count in counts]
    socket = router()
    receive, send = socket.recv, socket.send
    while True:
        for count, release in zip(counts, releases, strict=True):
            here = set()
            for _ in range(count):
                here.add(receive())
                receive()
            for who in here:
                send(who, zmq.SNDMORE)
                send(release)


def raw_barrier(address: str, counts: list[int]) -> None:
    """A round: so many frames and a release, one count after the other."""
    socket = dealer(zmq.Context(), address)
    answer(ready=True)

    def work(rounds: int) -> None:
        for _ in range(rounds):
            for count in counts:
                for _ in range(count):
                    socket.send(ARRIVAL)
                socket.recv()

    serve_counts(work)


def raw_connections(address: str, count: int, late: bool = False) -> None:
    sockets: list[zmq.Socket[bytes]] = []

    def work(times: int) -> None:
        if not sockets:
            context = zmq.Context()
            sockets.extend(dealer(context, address) for _ in range(count))
        for _ in range(times):
            for socket in sockets:
                socket.send(ARRIVAL)
            for socket in sockets:
                socket.recv()

    if not late:
        work(1)
    answer(ready=True)
    serve_counts(work)


ROLES: dict[str, Callable[..., Any]] = {
    role.__name__: role
    for role in (
        daemon,
        bare_daemon,
        taskserver,
        turns,
        rounds,
        connections,
        storm,
        actors,
        raw_relay,
        raw_server,
        raw_turns,
        raw_hub,
        raw_barrier,
        raw_connections,
    )
}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    made = ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
    if asyncio.iscoroutine(made):
        asyncio.run(made)
