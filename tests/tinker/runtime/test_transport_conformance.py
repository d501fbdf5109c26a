"""What every transport promises, checked on each of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from tinker.runtime.transport import (
    AddressInUse,
    Closed,
    Connection,
    Disconnected,
    FrameTooLarge,
    Limits,
    Listener,
    MemoryNetwork,
    PeerGone,
    PeerKey,
    PeerSlow,
    PublicKey,
    Security,
    Transport,
    Unfit,
    ZmqTransport,
    new_keys,
)

Make = Callable[[], Transport]
KEYS = new_keys()


class Everybody:
    """A guard that lets everybody in who has a key."""

    def admit(self, key: PublicKey) -> str | None:
        return f"holder of {key}"


@pytest.fixture(params=["memory", "memory with keys", "zmq", "zmq with keys"])
def transport(request: pytest.FixtureRequest) -> Transport:
    kind, _, protected = request.param.partition(" ")
    security = Security(KEYS, Everybody()) if protected else None
    if kind == "zmq":
        return ZmqTransport(security)
    return MemoryNetwork().secured(security) if security else MemoryNetwork()


def address(transport: Transport) -> str:
    return "tcp://127.0.0.1:0" if isinstance(transport, ZmqTransport) else "hub"


@asynccontextmanager
async def both(transport: Transport, limits: Limits = Limits()) -> AsyncIterator[tuple[Listener, Connection]]:  # noqa: B008
    listener = transport.listen(address(transport), limits)
    connection = transport.connect(listener.address, limits)
    try:
        yield listener, connection
    finally:
        await connection.aclose()
        await listener.aclose()


async def frame(listener: Listener) -> tuple[PeerKey, bytes]:
    arrival = await listener.receive()
    assert not isinstance(arrival, Disconnected)
    return arrival


async def disconnect(listener: Listener) -> PeerKey:
    """The peer of the next disconnect; frames before it are skipped."""
    while True:
        arrival = await listener.receive()
        if isinstance(arrival, Disconnected):
            return arrival.peer


async def test_a_frame_arrives_and_its_answer_comes_back(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        connection.send(b"question")
        peer, data = await frame(listener)
        listener.send(peer, data + b" answered")
        assert await connection.receive() == b"question answered"


async def test_frames_keep_their_order_in_both_directions(transport: Transport) -> None:
    sent = [b"%d" % n for n in range(3000)]
    async with both(transport) as (listener, connection):
        for data in sent:
            connection.send(data)
        arrived = [await frame(listener) for _ in sent]
        assert [data for _, data in arrived] == sent
        for data in sent:
            listener.send(arrived[0][0], data)
        assert [await connection.receive() for _ in sent] == sent


async def test_frames_that_leave_together_arrive_one_by_one_and_in_order(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        sent = [b"%d" % n for n in range(1000)]
        listener.send(peer, b"before")
        assert listener.send_many(peer, sent[:1]) == 1 and listener.send_many(peer, sent[1:]) == 999
        assert listener.send_many(peer, []) == 0
        listener.send(peer, b"after")
        assert [await connection.receive() for _ in range(1002)] == [b"before", *sent, b"after"]


async def test_of_frames_that_leave_together_a_slow_reader_gets_those_that_were_taken(transport: Transport) -> None:
    async with both(transport, Limits(queue=50)) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        count, taken = 0, 100
        while taken == 100:
            taken = listener.send_many(peer, [b"%d" % n + bytes(20_000) for n in range(count, count + 100)])
            count += taken
        assert count >= 50 and taken < 100
        assert listener.send_many(peer, [b"one more"]) == 0
        arrived = [int((await connection.receive()).rstrip(b"\0")) for _ in range(count)]
        assert arrived == list(range(count))


async def test_frames_that_leave_together_are_refused_together(transport: Transport) -> None:
    async with both(transport, Limits(frame=1000)) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        with pytest.raises(FrameTooLarge):
            listener.send_many(peer, [b"small", bytes(1001)])
        with pytest.raises(PeerGone):
            listener.send_many(PeerKey(b"nobody"), [b"small", b"small"])
        listener.send(peer, b"the first to arrive")
        assert await connection.receive() == b"the first to arrive"


@pytest.mark.parametrize("side", ["listener", "connection"])
async def test_frames_keep_their_order_while_queues_fill_and_empty(transport: Transport, side: str) -> None:
    count = 6000
    async with both(transport, Limits(queue=50)) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)

        async def produce() -> None:
            for n in range(count):
                while True:
                    try:
                        listener.send(peer, b"%d " % n + bytes(5000)) if side == "listener" else connection.send(
                            b"%d " % n + bytes(5000)
                        )
                        break
                    except PeerSlow:
                        await anyio.lowlevel.checkpoint()

        arrived = []
        async with anyio.create_task_group() as group:
            group.start_soon(produce)
            for _ in range(count):
                data = await connection.receive() if side == "listener" else (await frame(listener))[1]
                arrived.append(int(data.split()[0]))
        assert arrived == list(range(count))


async def test_a_burst_is_taken_at_once_and_is_bounded(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        for n in range(1000):
            connection.send(b"%d" % n)
        sizes, seen = [], 0
        while seen < 1000:
            sizes.append(len(await listener.receive_many()))
            seen += sizes[-1]
        assert seen == 1000 and max(sizes) <= 256


async def test_a_receiver_that_always_finds_something_lets_others_run(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        for n in range(2000):
            connection.send(b"%d" % n)
        ran = False

        async def other() -> None:
            nonlocal ran
            ran = True

        async with anyio.create_task_group() as group:
            await listener.receive_many()
            group.start_soon(other)
            for _ in range(3):
                await listener.receive_many()
            assert ran


async def test_every_request_of_many_clients_is_answered_from_separate_tasks(transport: Transport) -> None:
    clients, requests = 20, 500
    listener = transport.listen(address(transport))

    async def client(number: int, got: list[int]) -> None:
        connection = transport.connect(listener.address)
        for n in range(requests):
            connection.send(b"%d:%d" % (number, n))
        answers = Counter([await connection.receive() for _ in range(requests)])
        assert answers == Counter(b"%d:%d" % (number, n) for n in range(requests))
        got[number] = requests
        await connection.aclose()

    async def answer(peer: PeerKey, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        listener.send(peer, data)

    got = [0] * clients
    async with anyio.create_task_group() as group:
        for number in range(clients):
            group.start_soon(client, number, got)
        async with anyio.create_task_group() as answers:
            seen = 0
            while seen < clients * requests:
                for arrival in await listener.receive_many():
                    if not isinstance(arrival, Disconnected):
                        seen += 1
                        answers.start_soon(answer, *arrival)
    assert got == [requests] * clients
    await listener.aclose()


async def test_a_slow_reader_is_reported_and_loses_nothing_that_was_taken(transport: Transport) -> None:
    limits = Limits(queue=50)
    async with both(transport, limits) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        taken = 0
        with pytest.raises(PeerSlow, match="does not read"):
            while True:
                listener.send(peer, b"%d" % taken + bytes(20_000))
                taken += 1
        assert taken >= 50
        arrived = [int((await connection.receive()).rstrip(b"\0")) for _ in range(taken)]
        assert arrived == list(range(taken))


async def test_a_slow_listener_holds_its_senders_up_and_loses_nothing(transport: Transport) -> None:
    async with both(transport, Limits(queue=50)) as (listener, connection):
        taken = 0
        with pytest.raises(PeerSlow):
            while True:
                connection.send(b"%d" % taken + bytes(20_000))
                taken += 1
                if taken % 10 == 0:
                    await anyio.lowlevel.checkpoint()
        arrived = [int((await frame(listener))[1].rstrip(b"\0")) for _ in range(taken)]
        assert arrived == list(range(taken))


@pytest.mark.parametrize("side", ["listener", "connection"])
async def test_a_receive_cut_off_by_a_timeout_loses_nothing(transport: Transport, side: str) -> None:
    count, timeouts = 2000, 0
    async with both(transport) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)

        async def produce() -> None:
            for n in range(count):
                if side == "listener":
                    connection.send(b"%d" % n)
                else:
                    listener.send(peer, b"%d" % n)
                if n % 3 == 0:
                    await asyncio.sleep(0.0002)

        async with anyio.create_task_group() as group:
            group.start_soon(produce)
            arrived: list[bytes] = []
            while len(arrived) < count:
                try:
                    async with asyncio.timeout(0.0004):
                        arrived.append((await frame(listener))[1] if side == "listener" else await connection.receive())
                except TimeoutError:
                    timeouts += 1
        assert arrived == [b"%d" % n for n in range(count)]


async def test_a_bare_cancel_in_the_tick_of_arrival_loses_nothing(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        arrived = []
        for n in range(100):
            task = asyncio.create_task(listener.receive())
            await asyncio.sleep(0)
            connection.send(b"%d" % n)
            await asyncio.sleep(0)
            task.cancel()
            try:
                arrived.append((await task)[1])  # type: ignore[index]
            except asyncio.CancelledError:
                arrived.append((await frame(listener))[1])
        assert arrived == [b"%d" % n for n in range(100)]


async def test_sending_to_a_peer_that_is_gone_raises(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        await connection.aclose()
        assert await disconnect(listener) == peer
        with pytest.raises(PeerGone):
            listener.send(peer, b"anybody?")
        with pytest.raises(PeerGone):
            listener.send(PeerKey(b"nobody"), b"anybody?")


async def test_the_right_disconnect_is_reported_after_that_peers_frames(transport: Transport) -> None:
    listener = transport.listen(address(transport))
    connections = [transport.connect(listener.address) for _ in range(4)]
    peers = {}
    for n, connection in enumerate(connections):
        connection.send(b"%d" % n)
        peers[n], _ = await frame(listener)
    connections[2].send(b"last words")
    await connections[2].aclose(grace=5.0)
    arrivals = [await listener.receive(), await listener.receive()]
    assert arrivals == [(peers[2], b"last words"), Disconnected(peers[2])]
    for connection in connections:
        await connection.aclose()
    await listener.aclose()


async def test_closing_with_unsent_frames_returns_at_once_and_counts_them(transport: Transport) -> None:
    listener = transport.listen(address(transport))
    where = listener.address
    await listener.aclose()
    connection = transport.connect(where)
    for _ in range(3):
        connection.send(b"nobody hears this")
    with anyio.fail_after(5.0):
        assert await connection.aclose() == 3
        again = transport.connect(where)
        again.send(b"nor this")
        assert await again.aclose(grace=0.01) == 1


async def test_what_was_sent_just_before_closing_arrives_within_the_grace(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        for n in range(500):
            connection.send(b"%d" % n + bytes(20_000))
        assert await connection.aclose(grace=5.0) == 0
        assert [await frame(listener) for _ in range(500)] == [(peer, b"%d" % n + bytes(20_000)) for n in range(500)]


async def test_the_listeners_last_frames_arrive_within_the_grace(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        for n in range(500):
            listener.send(peer, b"%d" % n)
        assert await listener.aclose(grace=5.0) == 0
        assert [await connection.receive() for _ in range(500)] == [b"%d" % n for n in range(500)]


async def test_a_closed_end_says_so(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        async with anyio.create_task_group() as group:

            async def wait_for_it() -> None:
                with pytest.raises(Closed):
                    await connection.receive()

            group.start_soon(wait_for_it)
            await anyio.wait_all_tasks_blocked()
            await connection.aclose()
        await listener.aclose()
        with pytest.raises(Closed):
            connection.send(b"x")
        with pytest.raises(Closed):
            listener.send(PeerKey(b"p"), b"x")
        with pytest.raises(Closed):
            await listener.receive()
        assert await connection.aclose() == 0


@pytest.mark.parametrize("seed", range(5))
async def test_first_frames_are_not_lost_whatever_the_order_of_starts(transport: Transport, seed: int) -> None:
    rng = random.Random(seed)
    clients = 30
    first = transport.listen(address(transport))
    where = first.address
    await first.aclose()
    connections: list[Connection] = []
    starts_at = rng.randrange(clients)
    listener = None
    for number in range(clients):
        if number == starts_at:
            listener = transport.listen(where)
        connections.append(transport.connect(where))
        connections[-1].send(b"join %d" % number)
        await asyncio.sleep(0)
    assert listener is not None
    joined = dict([await frame(listener) for _ in range(clients)])
    assert sorted(joined.values()) == sorted(b"join %d" % n for n in range(clients))
    for peer, data in joined.items():
        listener.send(peer, b"round 1 for " + data)
    for number, connection in enumerate(connections):
        assert await connection.receive() == b"round 1 for join %d" % number
        await connection.aclose()
    await listener.aclose()


async def test_frames_wait_for_a_listener_up_to_the_bound(transport: Transport) -> None:
    first = transport.listen(address(transport))
    where = first.address
    await first.aclose()
    connection = transport.connect(where, Limits(queue=10))
    for n in range(10):
        connection.send(b"%d" % n)
    with pytest.raises(PeerSlow, match="nobody listens"):
        connection.send(b"one too many")
    listener = transport.listen(where)
    assert [(await frame(listener))[1] for _ in range(10)] == [b"%d" % n for n in range(10)]
    await connection.aclose()
    await listener.aclose()


async def test_a_connection_finds_the_listener_again_after_a_restart(transport: Transport) -> None:
    async with both(transport) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        await listener.aclose()
        again = transport.listen(listener.address)

        async def insist() -> None:
            while True:  # a frame sent before the outage is noticed may be lost: who must know asks again
                connection.send(b"still there?")
                await asyncio.sleep(0.02)

        async with anyio.create_task_group() as group:
            group.start_soon(insist)
            assert await frame(again) == (peer, b"still there?")
            group.cancel_scope.cancel()
        again.send(peer, b"yes")
        assert await connection.receive() == b"yes"
        await again.aclose()


async def test_a_crowd_finds_a_restarted_listener_again(transport: Transport) -> None:
    """Case 16, with 50 of them; `bench/coordination.py` does it with 1,024."""
    listener = transport.listen(address(transport))
    where = listener.address
    connections = [transport.connect(where) for _ in range(50)]
    for connection in connections:
        connection.send(b"hello")
    peers = {(await frame(listener))[0] for _ in connections}
    await listener.aclose()
    again = transport.listen(where)
    back: set[PeerKey] = set()

    async def insist(connection: Connection) -> None:
        while True:
            connection.send(b"still there?")
            await asyncio.sleep(0.2)

    async with anyio.create_task_group() as group:
        for connection in connections:
            group.start_soon(insist, connection)
        while back != peers:
            arrival = await again.receive()
            if not isinstance(arrival, Disconnected):
                back.add(arrival[0])
        group.cancel_scope.cancel()
    for connection in connections:
        await connection.aclose()
    await again.aclose()


async def test_no_two_connections_share_a_key(transport: Transport) -> None:
    listener = transport.listen(address(transport))
    connections = [transport.connect(listener.address) for _ in range(20)]
    for connection in connections:
        connection.send(b"w1")
    assert len({(await frame(listener))[0] for _ in connections}) == 20
    for connection in connections:
        await connection.aclose()
    await listener.aclose()


async def test_a_listener_says_how_much_waits_for_a_peer_that_does_not_read(transport: Transport) -> None:
    async with both(transport, Limits(queue=20_000)) as (listener, connection):
        connection.send(b"hello")
        peer, _ = await frame(listener)
        assert listener.waiting(peer) == 0
        sent = 0
        while not listener.waiting(peer):
            listener.send(peer, bytes(10_000))
            sent += 1
        for _ in range(sent):
            await connection.receive()
        while listener.waiting(peer):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert listener.waiting(PeerKey(b"nobody")) == 0


async def test_an_oversized_frame_is_refused_by_its_sender(transport: Transport) -> None:
    async with both(transport, Limits(frame=1000)) as (listener, connection):
        with pytest.raises(FrameTooLarge, match="1001 bytes; at most 1000"):
            connection.send(bytes(1001))
        connection.send(bytes(1000))
        peer, _ = await frame(listener)
        with pytest.raises(FrameTooLarge):
            listener.send(peer, bytes(1001))


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(transport: Transport) -> None:
    async with both(transport, Limits(frame=1000)) as (listener, good):
        bad = transport.connect(listener.address, Limits(frame=10_000))
        bad.send(b"hello")
        bad_peer, _ = await frame(listener)
        bad.send(bytes(5000))
        assert await listener.receive() == Unfit(bad_peer, "too large", "a frame of 5000 bytes; at most 1000 fit")
        assert await disconnect(listener) == bad_peer
        good.send(b"still here")
        assert (await frame(listener))[1] == b"still here"
        await bad.aclose()


async def test_an_address_in_use_is_named(transport: Transport) -> None:
    listener = transport.listen(address(transport))
    with pytest.raises(AddressInUse, match=f"{listener.address} is already in use"):
        transport.listen(listener.address)
    await listener.aclose()
    await transport.listen(listener.address).aclose()  # free again as soon as aclose has returned


async def test_two_receivers_at_once_are_an_error(transport: Transport) -> None:
    async with both(transport) as (listener, _), anyio.create_task_group() as group:
        group.start_soon(listener.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="two tasks receive"):
            await listener.receive()
        group.cancel_scope.cancel()


async def test_opening_and_closing_leaks_no_descriptors(transport: Transport) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def cycle() -> None:
        async with both(transport) as (listener, connection):
            connection.send(b"hello")
            await frame(listener)

    await cycle()
    before = descriptors()
    for _ in range(300):
        await cycle()
    assert descriptors() <= before + 5


async def test_clients_that_vanish_are_forgotten(transport: Transport) -> None:
    listener = transport.listen(address(transport))
    for n in range(50):
        connection = transport.connect(listener.address)
        connection.send(b"%d" % n)
        peer, _ = await frame(listener)
        listener.send(peer, b"answer nobody reads")
        await connection.aclose()
        assert await disconnect(listener) == peer
    await listener.aclose()
