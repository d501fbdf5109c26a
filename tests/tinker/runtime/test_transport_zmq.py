"""What only the transport between processes can meet: killed and frozen processes, forks, foreign sockets, paths."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tinker.runtime.transport import (
    AddressInUse,
    Disconnected,
    Limits,
    Listener,
    PeerGone,
    PeerKey,
    TransportError,
    Unfit,
    ZmqTransport,
    zmq_socket,
)
from tinker.runtime.transport.interface import BEYOND
from tinker.runtime.transport.zmq import ZmqListener

ANY = "tcp://127.0.0.1:0"
TALKER = """
import asyncio, sys
from tinker.runtime.transport import Limits, ZmqTransport
async def main():
    connection = ZmqTransport().connect(sys.argv[1], Limits(heartbeat=0.05))
    connection.send(b"hello")
    await asyncio.sleep(60)
asyncio.run(main())
"""

PASSER_BY = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.linger = 5000
    socket.connect(sys.argv[1])
    socket.send(b"hello")
"""


@contextmanager
def talker(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says hello and then nothing."""
    process = subprocess.Popen([sys.executable, "-c", TALKER, address])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def signalled(listener: Listener) -> None:
    """Block this thread, event loop and all, until something has arrived that nobody has looked at."""
    assert isinstance(listener, ZmqListener)
    assert select.select([listener._socket.raw.fileno()], [], [], 10.0)[0]


async def frame(listener: Listener) -> tuple[PeerKey, bytes]:
    arrival = await listener.receive()
    assert not isinstance(arrival, Disconnected)
    return arrival


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_process_that_dies_or_freezes_is_named(how: signal.Signals) -> None:
    listener = ZmqTransport().listen(ANY, Limits(heartbeat=0.05))
    with talker(listener.address), talker(listener.address) as other:
        peers = [(await frame(listener))[0] for _ in range(2)]
        os.kill(other.pid, how)
        arrival = await listener.receive()
        assert isinstance(arrival, Disconnected) and arrival.peer in peers
        with pytest.raises(PeerGone):
            listener.send(arrival.peer, b"take this turn")
        peers.remove(arrival.peer)
        listener.send(peers[0], b"then you")
    await listener.aclose()


async def test_a_send_that_swallows_the_edge_does_not_lose_the_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_socket, "SAFETY_POLL", 3600.0)
    listener = ZmqTransport().listen(ANY)
    connection = ZmqTransport().connect(listener.address)
    connection.send(b"hello")
    peer, _ = await frame(listener)
    for _ in range(20):
        waiting = asyncio.ensure_future(listener.receive())
        await asyncio.sleep(0)
        connection.send(b"request")
        signalled(listener)
        for _ in range(3):
            listener.send(peer, b"answer to somebody else")
        assert await asyncio.wait_for(waiting, 10.0) == (peer, b"request")
    await connection.aclose()
    await listener.aclose()


async def test_a_peer_that_comes_on_the_descriptor_of_a_lost_one_is_there() -> None:
    """Its frame is read before anybody has looked at the monitor, which says that the descriptor is used again."""
    listener = ZmqTransport().listen(ANY)
    assert isinstance(listener, ZmqListener)
    subprocess.run([sys.executable, "-c", PASSER_BY, listener.address], check=True)  # noqa: ASYNC221
    (peer, _), lost = await frame(listener), await listener.receive()
    assert lost == Disconnected(peer)
    (broken,) = listener._broken
    with talker(listener.address):
        while not listener._inbox.arrived:
            signalled(listener)
            listener._refill()
        came, _ = await frame(listener)
        assert listener._descriptor_of[came] == broken, "or this test shows nothing"
        assert not listener._lost
        listener.send(came, b"welcome")
    await listener.aclose()


async def test_every_lost_peer_is_named_although_their_descriptors_are_reused() -> None:
    listener = ZmqTransport().listen(ANY)
    assert isinstance(listener, ZmqListener)
    peers: list[PeerKey] = []
    lost: list[PeerKey] = []
    descriptors = set()
    for _ in range(3):
        subprocess.run([sys.executable, "-c", PASSER_BY, listener.address], check=True)  # noqa: ASYNC221  # the event loop stands still
        arrivals = await listener.receive_many()
        lost += [arrival.peer for arrival in arrivals if isinstance(arrival, Disconnected)]
        peers += [arrival[0] for arrival in arrivals if not isinstance(arrival, Disconnected)]
        descriptors.add(listener._descriptor_of[peers[-1]])
    assert len(descriptors) == 1, "or this test shows nothing"
    async with asyncio.timeout(10.0):
        while len(lost) < 3:
            arrival = await listener.receive()
            assert isinstance(arrival, Disconnected)
            lost.append(arrival.peer)
    assert lost == peers
    await listener.aclose()


async def test_a_socket_refuses_to_work_in_a_forked_process() -> None:
    listener = ZmqTransport().listen(ANY)
    connection = ZmqTransport().connect(listener.address)
    child = os.fork()
    if child == 0:
        try:
            connection.send(b"from the child")
        except TransportError as error:
            os._exit(42 if "after a fork" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222  # it ends at once
    assert os.waitstatus_to_exitcode(status) == 42
    connection.send(b"from the parent")
    assert (await frame(listener))[1] == b"from the parent"
    await connection.aclose()
    await listener.aclose()


async def test_what_a_foreign_socket_sends_in_parts_is_refused_as_one_frame() -> None:
    listener = ZmqTransport().listen(ANY)
    with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.linger = 0
        foreign.connect(listener.address)
        foreign.send_multipart([b"a", b"b", b"c"])
        foreign.send(b"whole")
        refused = await listener.receive()
        assert isinstance(refused, Unfit) and refused.why == "of several parts"
        assert await frame(listener) == (refused.peer, b"whole")
    await listener.aclose()


async def test_a_frame_far_above_the_limit_is_not_even_read() -> None:
    """ZeroMQ itself ends that connection, as soon as it hears how large the frame will be."""
    listener = ZmqTransport().listen(ANY, Limits(frame=1000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.linger = 0
        foreign.connect(listener.address)
        foreign.send(b"hello")
        peer, _ = await frame(listener)
        foreign.send(bytes(1000 * BEYOND + 1))
        assert await listener.receive() == Disconnected(peer)
    await listener.aclose()


async def test_a_listener_survives_bytes_that_are_not_zeromq() -> None:
    listener = ZmqTransport().listen(ANY)
    host, port = listener.address.removeprefix("tcp://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
    await writer.drain()
    connection = ZmqTransport().connect(listener.address)
    connection.send(b"hello")
    assert (await frame(listener))[1] == b"hello"
    writer.close()
    await connection.aclose()
    await listener.aclose()


async def test_a_path_in_use_is_not_taken_away_and_a_stale_one_is_reused(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/hub"
    listener = ZmqTransport().listen(address)
    with pytest.raises(AddressInUse):
        ZmqTransport().listen(address)
    await listener.aclose()
    (tmp_path / "hub").touch()
    again = ZmqTransport().listen(address)
    connection = ZmqTransport().connect(address)
    connection.send(b"hello")
    assert (await frame(again))[1] == b"hello"
    await connection.aclose()
    await again.aclose()


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:notaport", "tcp://203.0.113.1:0"])
async def test_an_address_nobody_can_listen_at_is_named(address: str) -> None:
    with pytest.raises(TransportError, match=f"cannot listen at '{address}'"):
        ZmqTransport().listen(address)


async def test_an_address_nobody_can_connect_to_is_named() -> None:
    with pytest.raises(TransportError, match="cannot connect to 'nonsense'"):
        ZmqTransport().connect("nonsense")


async def test_an_ipc_listener_takes_its_socket_file_with_it_and_no_other_ones(tmp_path: Path) -> None:
    path = tmp_path / "hub"
    first = ZmqTransport().listen(f"ipc://{path}")
    assert path.is_socket()
    path.unlink()  # somebody has cleaned up, and another one listens there now
    second = ZmqTransport().listen(f"ipc://{path}")
    await first.aclose()
    assert path.is_socket()
    await second.aclose()
    assert not path.exists()
