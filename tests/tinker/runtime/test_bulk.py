"""The data plane: bundles arrive whole and verified, or not at all."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from tinker.protocol.to_bulk import (
    Chunk,
    Contents,
    Credit,
    Fetch,
    FileSize,
    Push,
    Stored,
    ToBulkClient,
    ToBulkServer,
    TransferFailed,
)
from tinker.protocol.values import BlobRef, Role
from tinker.runtime.authorized import AuthorizedKeys
from tinker.runtime.bulk import BULK_LIMITS, BulkClient, BulkError, BulkServer, BundleCorrupt, BundleStore
from tinker.runtime.bundles import digest_of
from tinker.runtime.clock import ManualClock
from tinker.runtime.codec import decode, encode
from tinker.runtime.transport import Connection, MemoryNetwork, Security, Transport, ZmqTransport
from tinker.runtime.transport.curve import new_keys

FILES = {"a.bin": bytes(range(256)) * 3000, "b.bin": b"", "c.bin": b"last"}
BIG = {"big": bytes(20_000_000), "small": b"x"}


@dataclass
class Plane:
    store: BundleStore
    endpoint: str
    client: BulkClient
    transport: Transport
    clock: ManualClock
    server: BulkServer

    def connect(self) -> Connection:
        return self.transport.connect(self.endpoint, BULK_LIMITS)

    def put(self, name: str = "ann@1") -> BlobRef:
        return replace(self.store.put(name, FILES), endpoint=self.endpoint)


@pytest.fixture(params=["memory", "zmq"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return MemoryNetwork() if request.param == "memory" else ZmqTransport()


@asynccontextmanager
async def serving(transport: Transport, directory: Path, most: int = 64) -> AsyncIterator[Plane]:
    """A server with the store of another machine, and a client of this one."""
    listener = transport.listen("bulk" if isinstance(transport, MemoryNetwork) else "tcp://127.0.0.1:0", BULK_LIMITS)
    store, clock = BundleStore(directory, listener.address, machine="other"), ManualClock()
    client = BulkClient(lambda endpoint: transport.connect(endpoint, BULK_LIMITS))
    async with anyio.create_task_group() as group:
        server = BulkServer(store, listener, clock=clock, most=most)
        group.start_soon(server.serve)
        try:
            yield Plane(store, listener.address, client, transport, clock, server)
        finally:
            group.cancel_scope.cancel()
    await listener.aclose()


async def answer(connection: Connection) -> ToBulkClient:
    message: ToBulkClient = decode(await connection.receive(), ToBulkClient)
    return message


def inside(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_a_bundle_is_fetched_from_another_machine(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        assert await plane.client.fetch(plane.put()) == FILES


async def test_a_pushed_bundle_is_stored_and_can_be_fetched(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        ref = await plane.client.push(plane.endpoint, "batch-1", FILES)
        assert ref == plane.store.put("batch-1", FILES)
        assert await plane.client.fetch(ref) == FILES
        assert await plane.client.push(plane.endpoint, "batch-1", FILES) == ref


async def test_the_bytes_that_moved_are_counted_by_how(tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    transport = MemoryNetwork()
    async with serving(transport, tmp_path) as plane:
        ref = await plane.client.push(plane.endpoint, "batch-1", FILES)
        await plane.client.fetch(ref)
        assert plane.server.moved == {"received": size, "sent": size}
        assert plane.client.moved == {"pushed": size, "fetched": size}
        near = BulkClient(lambda endpoint: transport.connect(endpoint, BULK_LIMITS), machine="other")
        await near.fetch(ref)
        assert (near.moved, plane.server.moved["sent"]) == ({"read": size}, size)


@pytest.mark.parametrize("files", [{}, {"empty": b""}], ids=["no file", "an empty file"])
async def test_a_bundle_without_bytes_travels_too(
    transport: Transport, tmp_path: Path, files: dict[str, bytes]
) -> None:
    async with serving(transport, tmp_path) as plane:
        assert await plane.client.fetch(await plane.client.push(plane.endpoint, "nothing", files)) == files


async def test_many_transfers_share_a_server(transport: Transport, tmp_path: Path) -> None:
    fetched: list[dict[str, bytes]] = []
    async with serving(transport, tmp_path) as plane:
        ref = plane.put()

        async def fetch() -> None:
            fetched.append(await plane.client.fetch(ref))

        async with anyio.create_task_group() as group:
            for n in range(8):
                group.start_soon(fetch)
                group.start_soon(plane.client.push, plane.endpoint, f"batch-{n}", {"n": b"%d" % n * 400_000})
    assert fetched == [FILES] * 8
    assert len(inside(tmp_path)) == 9


async def test_on_the_same_machine_the_file_is_read_and_nobody_is_asked(tmp_path: Path) -> None:
    ref = replace(BundleStore(tmp_path).put("ann@1", FILES), endpoint="nobody listens here")
    client = BulkClient(MemoryNetwork().connect)
    assert await client.fetch(ref) == FILES
    (Path(ref.path) / "c.bin").write_bytes(b"lost")
    with pytest.raises(BundleCorrupt, match="bundle ann@1 is corrupt"):
        await client.fetch(ref)


async def test_a_bundle_that_nobody_serves_is_named(tmp_path: Path) -> None:
    ref = BundleStore(tmp_path, machine="other").put("ann@1", FILES)
    with pytest.raises(BulkError, match=r"bundle ann@1 is not on this machine .* and no endpoint serves it"):
        await BulkClient(MemoryNetwork().connect).fetch(ref)


async def test_a_bundle_damaged_at_its_source_is_not_sent(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        ref = plane.put()
        (Path(ref.path) / "c.bin").write_bytes(b"lost")
        with pytest.raises(BulkError, match="there is no bundle ann@1 of this digest"):
            await plane.client.fetch(ref)


@pytest.mark.parametrize(("size", "says"), [(4, "its digest is"), (5, "offers 4 bytes as bundle ann@1, expected 5")])
async def test_what_is_not_the_bundle_that_was_asked_for_is_refused(
    transport: Transport, tmp_path: Path, size: int, says: str
) -> None:
    listener = transport.listen("bulk" if isinstance(transport, MemoryNetwork) else "tcp://127.0.0.1:0", BULK_LIMITS)
    client = BulkClient(lambda endpoint: transport.connect(endpoint, BULK_LIMITS))

    async def lie() -> None:
        peer, asked = await listener.receive()  # type: ignore[misc]
        assert isinstance(decode(asked, ToBulkServer), Fetch)
        listener.send(peer, encode(Contents((FileSize("c.bin", 4),))))
        listener.send(peer, encode(Chunk(b"lost")))

    async with anyio.create_task_group() as group:
        group.start_soon(lie)
        with pytest.raises(BundleCorrupt, match=says):
            await client.fetch(
                BlobRef("ann@1", digest_of({"c.bin": b"last"}), size, "other", "nowhere", listener.address)
            )
    await listener.aclose()


async def test_a_bundle_damaged_on_its_way_in_is_refused_and_leaves_nothing(
    transport: Transport, tmp_path: Path
) -> None:
    async with serving(transport, tmp_path) as plane:
        connection = plane.connect()
        connection.send(encode(Push("batch", digest_of({"a": b"good"}), (FileSize("a", 4),))))
        assert isinstance(await answer(connection), Credit)
        connection.send(encode(Chunk(b"evil")))
        failed = await answer(connection)
        assert isinstance(failed, TransferFailed) and "bundle batch is corrupt" in failed.reason
        await connection.aclose()
    assert inside(tmp_path) == []


async def test_another_bundle_of_the_same_name_is_refused(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        plane.put()
        with pytest.raises(BulkError, match="holds another bundle"):
            await plane.client.push(plane.endpoint, "ann@1", {"a": b"other"})


async def test_an_unknown_bundle_is_refused_with_its_name(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        with pytest.raises(BulkError, match="there is no bundle gone"):
            await plane.client.fetch(replace(plane.put(), name="gone"))


async def test_who_was_not_told_of_a_bundle_cannot_fetch_it(transport: Transport, tmp_path: Path) -> None:
    """Another run's host may guess names; what a bundle holds is known by its digest."""
    async with serving(transport, tmp_path) as plane:
        ref = plane.put("run-of-ann=batch")
        for digest in ("", "0" * len(ref.digest), ref.digest[:12]):
            with pytest.raises(BulkError, match="there is no bundle run-of-ann=batch of this digest") as told:
                await plane.client.fetch(replace(ref, digest=digest))
            assert ref.digest[:12] not in str(told.value).replace(digest or "-", "")
        assert await plane.client.fetch(ref) == FILES


async def test_two_machines_with_keys_exchange_bundles_and_a_third_key_gets_none(tmp_path: Path) -> None:
    server, ann, spy = new_keys(), new_keys(), new_keys()
    file = tmp_path / "authorized"
    file.write_text(f"{ann.public} host ann\n")
    guard = AuthorizedKeys.read(file).only(Role.HOST)
    listener = ZmqTransport(Security(server, guard)).listen("tcp://127.0.0.1:0", BULK_LIMITS)
    store = BundleStore(tmp_path / "there", listener.address, machine="there")
    made = {
        name: BulkClient(partial(ZmqTransport(Security(keys)).connect, limits=BULK_LIMITS), machine="here", stall=10.0)
        for name, keys in (("ann", ann), ("spy", spy))
    }
    async with anyio.create_task_group() as group:
        group.start_soon(BulkServer(store, listener).serve)
        pushed = await made["ann"].push(listener.address, "run=batch", FILES)
        assert (pushed.machine, pushed.endpoint) == ("there", listener.address)
        adapter = store.put("run=adapter", FILES)
        assert await made["ann"].fetch(adapter) == FILES
        with pytest.raises(BulkError, match="does not accept our key"):
            await made["spy"].fetch(adapter)
        group.cancel_scope.cancel()
    await listener.aclose()


@pytest.mark.parametrize("evil", ["../evil", "/nonexistent/evil", ".."])
async def test_no_name_leads_out_of_the_store(transport: Transport, tmp_path: Path, evil: str) -> None:
    async with serving(transport, tmp_path / "store") as plane:
        attempts = [Fetch(evil, "d"), Push(evil, "d", (FileSize("a", 1),)), Push("fine", "d", (FileSize(evil, 1),))]
        for attempt in attempts:
            connection = plane.connect()
            connection.send(encode(attempt))
            failed = await answer(connection)
            assert isinstance(failed, TransferFailed) and "cannot name a bundle or a file" in failed.reason
            await connection.aclose()
        with pytest.raises(BulkError, match="cannot name"):
            await plane.client.push(plane.endpoint, "fine", {evil: b""})
    assert inside(tmp_path) == ["store"] and inside(tmp_path / "store") == []


async def test_a_push_interrupted_by_a_disconnect_leaves_nothing(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        connection = plane.connect()
        connection.send(encode(Push("batch", "d", (FileSize("a", 1_000_000),))))
        assert await answer(connection) == Credit(8)
        connection.send(encode(Chunk(bytes(1000))))
        assert await answer(connection) == Credit(1)
        assert len(inside(tmp_path)) == 1
        await connection.aclose()
        while inside(tmp_path):
            await anyio.lowlevel.checkpoint()


async def test_a_push_interrupted_by_the_servers_end_leaves_nothing(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        connection = plane.connect()
        connection.send(encode(Push("batch", "d", (FileSize("a", 1_000_000),))))
        assert await answer(connection) == Credit(8)
    await connection.aclose()
    assert inside(tmp_path) == []


async def test_a_stalled_transfer_is_dropped(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        connection = plane.connect()
        connection.send(encode(Push("batch", "d", (FileSize("a", 1_000_000),))))
        assert await answer(connection) == Credit(8)
        plane.clock.advance(61.0)
        assert await answer(connection) == TransferFailed("no progress for 60 s")
        await connection.aclose()
        assert inside(tmp_path) == []


async def test_a_server_that_says_nothing_is_given_up(transport: Transport) -> None:
    listener = transport.listen("bulk" if isinstance(transport, MemoryNetwork) else "tcp://127.0.0.1:0", BULK_LIMITS)
    client = BulkClient(lambda endpoint: transport.connect(endpoint, BULK_LIMITS), stall=0.01)
    with pytest.raises(BulkError, match=r"said nothing for 0.01 s: is its task server or host alive\?"):
        await client.push(listener.address, "batch", FILES)
    await listener.aclose()


async def test_a_server_sends_no_more_than_it_has_credit_for(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        digest = plane.store.put("big", BIG).digest
        connection = plane.connect()
        connection.send(encode(Fetch("big", digest)))
        assert isinstance(await answer(connection), Contents)
        connection.send(encode(Credit(1_000_000)))
        assert [type(await answer(connection)) for _ in range(8)] == [Chunk] * 8
        connection.send(encode(Credit(2)))
        assert [type(await answer(connection)) for _ in range(2)] == [Chunk] * 2
        connection.send(b"garbage")  # answers keep their order: a further chunk would come before this one
        assert isinstance(await answer(connection), TransferFailed)
        await connection.aclose()


async def test_what_does_not_belong_is_refused_and_the_server_lives(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        connection = plane.connect()
        for wrong, says in (
            (b"garbage", "not a message"),
            (encode(Chunk(b"x")), "belongs to no transfer"),
            (encode(Push("p", "d", (FileSize("b", 1), FileSize("a", 1)))), "sorted by name"),
            (encode(Push("p", "d", (FileSize("a", -1),))), "sorted by name"),
            (encode(Push("p", "d", (FileSize("a", 1 << 60),))), "no room for bundle p"),
        ):
            connection.send(wrong)
            failed = await answer(connection)
            assert isinstance(failed, TransferFailed) and says in failed.reason
        connection.send(encode(Push("p", "d", (FileSize("a", 1),))))
        assert await answer(connection) == Credit(8)
        connection.send(encode(Chunk(b"too much")))
        failed = await answer(connection)
        assert isinstance(failed, TransferFailed) and "more bytes arrived than were announced" in failed.reason
        await connection.aclose()
        assert await plane.client.fetch(plane.put()) == FILES


async def test_too_many_transfers_at_once_are_refused(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path, most=1) as plane:
        connection = plane.connect()
        connection.send(encode(Push("batch", "d", (FileSize("a", 1_000_000),))))
        assert await answer(connection) == Credit(8)
        with pytest.raises(BulkError, match="1 transfers are under way"):
            await plane.client.fetch(plane.put())
        await connection.aclose()


async def test_twenty_megabytes_need_little_memory_on_the_server(transport: Transport, tmp_path: Path) -> None:
    async with serving(transport, tmp_path) as plane:
        tracemalloc.start()
        try:
            ref = await plane.client.push(plane.endpoint, "big", BIG)
            assert tracemalloc.get_traced_memory()[1] < 8_000_000  # both ends: 8 chunks each way, and copies of one
            tracemalloc.reset_peak()
            fetched = await plane.client.fetch(ref)
            assert tracemalloc.get_traced_memory()[1] < 36_000_000  # the client's result is 20 MB of it
        finally:
            tracemalloc.stop()
        assert fetched == BIG and isinstance(ref, BlobRef)
        assert Stored(ref) == Stored(plane.store.put("big", BIG))
