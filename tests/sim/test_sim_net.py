"""The simulated network keeps the transport's promises in good weather, and breaks them as told in bad weather."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from sim_loop import SimLoop
from sim_net import SimConnection, SimListener, SimNetwork

from tinker.runtime.transport import AddressInUse, Disconnected, PeerGone, PeerKey


def simulate(body: Callable[[SimNetwork], Awaitable[None]], seed: int = 0) -> SimNetwork:
    loop = SimLoop(seed)
    net = SimNetwork(loop, seed, lambda *frame: None, lambda *frame: None)

    async def main() -> None:
        await body(net)

    loop.run_until_complete(main())
    loop.close()
    return net


def both(net: SimNetwork) -> tuple[SimListener, SimConnection]:
    return net.transport("hub").listen("hub"), net.transport("peer").connect("hub")


async def some(listener: SimListener, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += [arrival[1] for arrival in await listener.receive_many() if not isinstance(arrival, Disconnected)]
    return frames


@pytest.mark.parametrize("seed", range(5))
def test_a_connection_keeps_its_order_while_others_are_faster_or_slower(seed: int) -> None:
    async def body(net: SimNetwork) -> None:
        listener, first = both(net)
        second = net.transport("other").connect("hub")
        for number in range(20):
            first.send(b"a%d" % number)
            second.send(b"b%d" % number)
        frames = await some(listener, 40)
        for letter in (b"a", b"b"):
            assert [frame for frame in frames if frame[:1] == letter] == [letter + b"%d" % n for n in range(20)]

    simulate(body, seed)


def test_frames_are_lost_and_doubled_as_the_weather_says() -> None:
    async def body(net: SimNetwork) -> None:
        listener, connection = both(net)
        net.weather.loss, net.weather.duplicate = 0.3, 0.3
        for number in range(100):
            connection.send(b"%d" % number)
        await anyio.sleep(10)
        frames = await some(listener, 1)
        lost, doubled = net.did["frames lost"], net.did["frames duplicated"]
        assert lost > 10 and doubled > 10
        assert len(frames) == 100 - lost + doubled

    simulate(body)


def test_a_cut_holds_one_direction_until_it_heals() -> None:
    async def body(net: SimNetwork) -> None:
        listener, connection = both(net)
        connection.send(b"first")
        (arrival,) = await listener.receive_many()
        assert not isinstance(arrival, Disconnected)
        net.cut("hub", "peer")
        listener.send(arrival[0], b"answer")
        connection.send(b"second")
        assert await some(listener, 1) == [b"second"]
        net.loop.call_later(5.0, net.heal, "hub", "peer")
        assert await connection.receive() == b"answer"
        assert net.loop.time() >= 5.0

    simulate(body)


def test_a_broken_connection_loses_what_is_under_way_tells_its_listener_and_comes_back() -> None:
    async def body(net: SimNetwork) -> None:
        listener, connection = both(net)
        connection.send(b"first")
        await some(listener, 1)
        connection.send(b"lost")
        net.disconnect(connection, told=True)
        connection.send(b"after")
        assert await listener.receive() == Disconnected(connection.key)
        with pytest.raises(PeerGone):
            listener.send(connection.key, b"nobody there")
        assert await some(listener, 1) == [b"after"]
        listener.send(connection.key, b"answer")
        assert await connection.receive() == b"answer"

    simulate(body)


def test_frames_wait_for_a_listener_that_starts_again() -> None:
    async def body(net: SimNetwork) -> None:
        _, connection = both(net)
        net.kill("hub")
        connection.send(b"waits")
        again = net.transport("hub 2").listen("hub")
        assert await some(again, 1) == [b"waits"]

    simulate(body)


def test_an_address_in_use_is_refused_and_an_unknown_peer_is_gone() -> None:
    async def body(net: SimNetwork) -> None:
        listener, _ = both(net)
        with pytest.raises(AddressInUse):
            net.transport("other").listen("hub")
        with pytest.raises(PeerGone):
            listener.send(PeerKey(b"nobody"), b"")

    simulate(body)
