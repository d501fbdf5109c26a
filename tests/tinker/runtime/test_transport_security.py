"""Keys at both ends: who is let in, who is told why not, and what happens when nobody checks keys any more."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest
import zmq

from tinker.runtime.transport import (
    Connection,
    Disconnected,
    GuardFailed,
    KeyPair,
    Listener,
    MemoryNetwork,
    PeerKey,
    PublicKey,
    Security,
    Transport,
    TransportError,
    Unauthorized,
    ZmqTransport,
    keys_of,
    new_keys,
    pinned,
    unpinned,
)
from tinker.runtime.transport.zmq import ZmqListener

SERVER, ANN, BOB, EVE = new_keys(), new_keys(), new_keys(), new_keys()


class Guests:
    """A guard with a list."""

    def __init__(self, **guests: KeyPair) -> None:
        self.names = {keys.public: name for name, keys in guests.items()}

    def admit(self, key: PublicKey) -> str | None:
        return self.names.get(key)


class World:
    """One kind of transport, as processes with different keys see it."""

    def __init__(self, kind: str) -> None:
        self.network = MemoryNetwork() if kind == "memory" else None
        self.address = "hub" if self.network is not None else "tcp://127.0.0.1:0"

    def holding(self, keys: KeyPair | None, guard: Guests | None = None) -> Transport:
        security = Security(keys, guard) if keys is not None else None
        if self.network is None:
            return ZmqTransport(security)
        return self.network.secured(security) if security is not None else self.network


@pytest.fixture(params=["memory", "zmq"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@asynccontextmanager
async def ends(*given: Listener | Connection) -> AsyncIterator[None]:
    try:
        with anyio.fail_after(10):
            yield
    finally:
        for end in reversed(given):
            await end.aclose()


async def frame(listener: Listener) -> tuple[PeerKey, bytes]:
    arrival = await listener.receive()
    assert not isinstance(arrival, Disconnected)
    return arrival


async def counted(listener: Listener, refused: int) -> None:
    """Wait until that many have been refused."""
    while sum(listener.refused.values()) < refused:  # noqa: ASYNC110 (nobody tells us)
        await anyio.sleep(0.01)


async def test_a_frame_says_whose_key_it_came_with(world: World) -> None:
    listener = world.holding(SERVER, Guests(ann=ANN, bob=BOB)).listen(world.address)
    ann, bob = (world.holding(keys).connect(listener.address) for keys in (ANN, BOB))
    async with ends(listener, ann, bob):
        ann.send(b"ann")
        bob.send(b"bob")
        for _ in range(2):
            peer, data = await frame(listener)
            assert listener.identity(peer) == data.decode()
            listener.send(peer, data + b"!")
        assert (await ann.receive(), await bob.receive()) == (b"ann!", b"bob!")
        assert listener.identity(PeerKey(b"nobody")) is None
        assert sum(listener.refused.values()) == 0


async def test_an_unknown_key_is_refused_told_and_counted(world: World) -> None:
    listener = world.holding(SERVER, Guests(ann=ANN)).listen(world.address)
    ann, eve = (world.holding(keys).connect(listener.address) for keys in (ANN, EVE))
    async with ends(listener, ann, eve):
        eve.send(b"let me in")
        with pytest.raises(Unauthorized, match=f"does not accept our key .* must add {EVE.public}") as caught:
            await eve.receive()
        assert EVE.secret not in str(caught.value)
        ann.send(b"hello")
        assert (await frame(listener))[1] == b"hello"  # and nothing of Eve's before it
        assert listener.refused["unknown key"] == 1


async def test_a_connection_without_keys_is_refused_by_a_guarded_listener(world: World) -> None:
    listener = world.holding(SERVER, Guests(ann=ANN)).listen(world.address)
    bare, _ = unpinned(listener.address)
    plain, ann = world.holding(None).connect(bare), world.holding(ANN).connect(listener.address)
    async with ends(listener, plain, ann):
        plain.send(b"let me in")
        with pytest.raises(Unauthorized, match="protected by keys"):
            await plain.receive()
        ann.send(b"hello")
        assert (await frame(listener))[1] == b"hello"
        await counted(listener, 1)


async def test_a_connection_speaks_to_the_key_it_names_or_to_nobody(world: World) -> None:
    guarded = world.holding(SERVER, Guests(ann=ANN)).listen(world.address)
    bare, _ = unpinned(guarded.address)
    misled = world.holding(ANN).connect(pinned(bare, EVE.public))
    async with ends(guarded, misled):
        misled.send(b"secret")
        with pytest.raises(Unauthorized, match="does not hold the key"):
            await misled.receive()
        assert guarded.refused


async def test_a_connection_that_names_a_key_never_falls_back_to_an_open_listener(world: World) -> None:
    listener = world.holding(None).listen(world.address)
    ann, plain = world.holding(ANN).connect(pinned(listener.address, SERVER.public)), world.holding(None)
    other = plain.connect(listener.address)
    async with ends(listener, ann, other):
        ann.send(b"secret")
        with pytest.raises(Unauthorized):
            await ann.receive()
        other.send(b"hello")
        assert (await frame(listener))[1] == b"hello"


async def test_a_removed_key_is_cut_off_and_the_others_stay(world: World) -> None:
    guests = Guests(ann=ANN, eve=EVE)
    listener = world.holding(SERVER, guests).listen(world.address)
    ann, eve = (world.holding(keys).connect(listener.address) for keys in (ANN, EVE))
    async with ends(listener, ann, eve):
        eve.send(b"hello")
        gone, _ = await frame(listener)
        ann.send(b"hello")
        kept, _ = await frame(listener)
        del guests.names[EVE.public]
        listener.recheck()
        assert await listener.receive() == Disconnected(gone)
        with pytest.raises(Unauthorized):
            await eve.receive()
        eve.send(b"am I still in?")
        ann.send(b"and I?")
        assert await frame(listener) == (kept, b"and I?")
        assert (listener.identity(kept), listener.identity(gone)) == ("ann", None)


async def heard_again(listener: Listener, connection: Connection) -> None:
    """Send until something arrives: a frame that went into the connection that was cut is lost with it."""
    while True:
        connection.send(b"hello")
        with anyio.move_on_after(0.2):
            if isinstance(await listener.receive(), tuple):
                return


async def test_a_key_whose_identity_has_changed_is_cut_off_and_comes_back_as_the_new_one(world: World) -> None:
    guests = Guests(ann=ANN)
    listener = world.holding(SERVER, guests).listen(world.address)
    ann = world.holding(ANN).connect(listener.address)
    async with ends(listener, ann):
        ann.send(b"hello")
        peer, _ = await frame(listener)
        guests.names[ANN.public] = "anna"
        listener.recheck()
        if world.network is None:
            assert await listener.receive() == Disconnected(peer)
            await heard_again(listener, ann)
        assert listener.identity(peer) == "anna"


async def test_an_address_with_a_key_needs_one_of_ours(world: World) -> None:
    with pytest.raises(TransportError, match="we have none: make one with `opentinker keys new"):
        world.holding(None).connect(pinned("tcp://127.0.0.1:1", SERVER.public))
    with pytest.raises(TransportError, match="no public key") as caught:
        world.holding(ANN).connect(f"tcp://127.0.0.1:1#{ANN.secret}")
    assert ANN.secret not in str(caught.value)


async def test_two_listeners_of_one_process_let_different_people_in() -> None:
    world = World("zmq")
    first = world.holding(SERVER, Guests(ann=ANN)).listen(world.address)
    second = world.holding(BOB, Guests(eve=EVE)).listen(world.address)
    ann, eve = world.holding(ANN).connect(first.address), world.holding(EVE).connect(second.address)
    wrong = world.holding(ANN).connect(second.address)
    async with ends(first, second, ann, eve, wrong):
        ann.send(b"1")
        eve.send(b"2")
        wrong.send(b"3")
        assert [(await frame(first))[1], (await frame(second))[1]] == [b"1", b"2"]
        with pytest.raises(Unauthorized):
            await wrong.receive()


async def test_a_guard_that_fails_closes_the_listener_and_lets_nobody_in() -> None:
    class Broken:
        def admit(self, key: PublicKey) -> str | None:
            raise RuntimeError("the disk is on fire")

    listener = ZmqTransport(Security(SERVER, Broken())).listen("tcp://127.0.0.1:0")
    ann = ZmqTransport(Security(ANN)).connect(listener.address)
    async with ends(listener, ann):
        ann.send(b"hello")
        with pytest.raises(GuardFailed, match="its check of keys died of RuntimeError"):
            await listener.receive()
        bare, _ = unpinned(listener.address)
        host, port = bare.removeprefix("tcp://").split(":")
        assert await listener.aclose() == 0
        with pytest.raises(ConnectionRefusedError), socket.create_connection((host, int(port))):
            pass


async def test_a_cancelled_key_check_closes_the_listener_too() -> None:
    listener = ZmqTransport(Security(SERVER, Guests(ann=ANN))).listen("tcp://127.0.0.1:0")
    assert isinstance(listener, ZmqListener)
    async with ends(listener):
        zap = listener._socket.zap
        assert zap is not None
        zap._task.cancel()
        with pytest.raises(GuardFailed):
            await listener.receive()


@contextmanager
def dealer(address: str, keys: KeyPair, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A foreign client that chooses its own identity."""
    from tinker.runtime.transport.curve import protect_connection

    bare, server = unpinned(address)
    assert server is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        protect_connection(raw, keys, server, 1_000_000)
        raw.set(zmq.IDENTITY, identity)
        raw.connect(bare)
        yield raw


async def test_nobody_speaks_on_the_connection_of_another_key() -> None:
    listener = ZmqTransport(Security(SERVER, Guests(ann=ANN, eve=EVE))).listen("tcp://127.0.0.1:0")
    name = b"\x01" + os.urandom(15)
    async with ends(listener):
        with dealer(listener.address, ANN, name) as ann:
            ann.send(b"hello")
            peer, _ = await frame(listener)
            assert (peer, listener.identity(peer)) == (name, "ann")
            with dealer(listener.address, EVE, name) as eve:
                eve.send(b"I am Ann")
                assert await listener.receive() == Disconnected(peer)
                assert listener.identity(peer) is None
        assert listener.refused["connection of another key"] == 1


async def test_garbage_before_the_handshake_is_counted_and_harms_nobody() -> None:
    listener = ZmqTransport(Security(SERVER, Guests(ann=ANN))).listen("tcp://127.0.0.1:0")
    bare, _ = unpinned(listener.address)
    host, port = bare.removeprefix("tcp://").split(":")
    ann = ZmqTransport(Security(ANN)).connect(listener.address)
    async with ends(listener, ann):
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f" + b"x" * 200, b"\x01\x00junk", b""):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(junk)
        ann.send(b"hello")
        assert (await frame(listener))[1] == b"hello"
        await counted(listener, 4)


async def test_a_peer_of_the_oldest_protocol_is_not_heard_and_harms_nobody() -> None:
    """It needs no handshake, and its frames carry nothing that tells one connection from another. Such a peer once ended the daemon."""
    listener = ZmqTransport().listen("tcp://127.0.0.1:0")
    host, port = listener.address.removeprefix("tcp://").split(":")
    good = ZmqTransport().connect(listener.address)
    async with ends(listener, good):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"\x01\x00" + b"\x05\x00junk")  # its (empty) identity, then a frame of four bytes
            async with anyio.create_task_group() as waiting:

                async def knock() -> None:
                    await counted(listener, 1)
                    good.send(b"hello")

                waiting.start_soon(knock)
                assert (await frame(listener))[1] == b"hello"
        assert listener.refused["no handshake of ours"] == 1


def test_a_secret_is_in_no_text_of_a_pair() -> None:
    assert ANN.secret not in repr(ANN) + str(ANN) + repr(Security(ANN))
    with pytest.raises(ValueError) as caught:
        keys_of(ANN.secret + "0")
    assert ANN.secret not in str(caught.value)
    assert keys_of(ANN.secret) == ANN
