"""The serving end of the data plane: any number of transfers, one per connection, in one loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from tinker.protocol.to_bulk import (
    Chunk,
    Contents,
    Credit,
    Fetch,
    Push,
    Stored,
    ToBulkClient,
    ToBulkServer,
    TransferFailed,
)
from tinker.protocol.values import BlobRef
from tinker.runtime.bulk_stream import WINDOW, Assembly, pieces_of
from tinker.runtime.bundles import BulkError, BundleExists, BundleStore, IncomingBundle
from tinker.runtime.clock import Clock, MonotonicClock
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.transport import Closed, Disconnected, Listener, PeerGone, PeerKey, PeerSlow, Unfit


@dataclass(slots=True)
class _Sending:
    pieces: Iterator[bytes]
    touched: float
    credit: int = 0


@dataclass(slots=True)
class _Receiving:
    touched: float
    bundle: IncomingBundle | None = None  # None: we still look, or already commit
    assembly: Assembly | None = None


def _nothing() -> Iterator[bytes]:
    """No pieces yet."""
    yield from ()


class BulkServer:
    """Serves a store's bundles, and takes new ones, over a listener of its own (made with BULK_LIMITS; the caller closes it). Whoever
    knows a bundle's digest may have it; digests travel only with the references that the coordinator hands to a run's own peers.

    A transfer without progress for `stall` seconds is dropped; at most `most` run at once, further ones are refused. `moved`: bytes sent
    and received.
    """

    def __init__(
        self, store: BundleStore, listener: Listener, *, clock: Clock | None = None, stall: float = 60.0, most: int = 64
    ) -> None:
        self._store = store
        self._listener = listener
        self._clock = clock or MonotonicClock()
        self._stall = stall
        self._most = most
        self._transfers: dict[PeerKey, _Sending | _Receiving] = {}
        self.moved: Counter[str] = Counter()

    async def serve(self) -> None:
        """Until it is cancelled or the listener is closed. Then no half-written bundle is left."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._drop_stalled, name="bulk stalls")
                try:
                    while True:
                        for arrival in await self._listener.receive_many():
                            if isinstance(arrival, Disconnected):
                                self._drop(arrival.peer)
                            elif isinstance(arrival, Unfit):
                                self._fail(arrival.peer, arrival.reason)
                            else:
                                self._guarded(arrival[0], self._handle, *arrival, group)
                except Closed:
                    group.cancel_scope.cancel()
        finally:
            for peer in list(self._transfers):
                self._drop(peer)

    def _guarded(self, peer: PeerKey, act: Callable[..., None], *arguments: Any) -> None:
        """Do it; what goes wrong ends this peer's transfer and nothing else."""
        try:
            act(*arguments)
        except (BulkError, WireError, OSError) as error:
            self._fail(peer, str(error))

    def _handle(self, peer: PeerKey, data: bytes, group: TaskGroup) -> None:
        message: ToBulkServer = decode(data, ToBulkServer)
        match message, self._transfers.get(peer):
            case ((Fetch() | Push()), (_Sending() | _Receiving())):
                raise BulkError("one connection carries one transfer at a time")
            case ((Fetch() | Push()), None) if len(self._transfers) >= self._most:
                raise BulkError(f"{self._most} transfers are under way, which is all this server runs: try again later")
            case Fetch() as fetch, None:
                self._transfers[peer] = sending = _Sending(_nothing(), self._clock.now())
                group.start_soon(self._offer, peer, fetch, sending, name=f"bulk offer {fetch.name}")
            case Push() as push, None:
                self._transfers[peer] = receiving = _Receiving(self._clock.now())
                group.start_soon(self._begin, peer, push, receiving, name=f"bulk begin {push.name}")
            case Credit(chunks=chunks), _Sending() as sending:
                sending.credit = min(WINDOW, sending.credit + max(0, chunks))
                self._pump(peer, sending)
            case Chunk(data=piece), _Receiving() as receiving:
                self._take(peer, piece, receiving, group)
            case Credit(), None:
                pass  # for the last chunks of a fetch
            case _:
                raise BulkError(f"{type(message).__name__} belongs to no transfer of this connection: begin again")

    async def _offer(self, peer: PeerKey, fetch: Fetch, sending: _Sending) -> None:
        """Look for the bundle, and whether the peer knows its digest: that it was told by whoever owns it."""
        name = fetch.name
        try:
            if await anyio.to_thread.run_sync(self._known, name, fetch.digest) is None:
                raise BulkError(f"there is no bundle {name} of this digest in {self._store.directory}")
            if self._transfers.get(peer) is sending:  # else it has gone meanwhile
                files = self._store.listing(name)
                sending.pieces = pieces_of(files, lambda file: (self._store.directory / name / file).open("rb"))
                self._send(peer, Contents(files))
        except (BulkError, OSError) as error:
            if self._transfers.get(peer) is sending:
                self._fail(peer, str(error))

    def _known(self, name: str, digest: str) -> BlobRef | None:
        """None, too, if there is another bundle of this name: its digest is nobody's business."""
        try:
            return self._store.existing(name, digest)
        except BundleExists:
            return None

    def _pump(self, peer: PeerKey, sending: _Sending) -> None:
        while sending.credit:
            piece = next(sending.pieces, None)
            if piece is None:
                self._drop(peer)
                return
            self._send(peer, Chunk(piece))
            self.moved["sent"] += len(piece)
            sending.credit -= 1
            sending.touched = self._clock.now()

    async def _begin(self, peer: PeerKey, push: Push, receiving: _Receiving) -> None:
        """Look for the bundle, else make room for it and give the first credit."""
        size = sum(file.size for file in push.files)
        try:
            existing = await anyio.to_thread.run_sync(self._store.existing, push.name, push.digest)
            if self._transfers.get(peer) is not receiving:
                return  # it has gone meanwhile
            if existing is not None:
                self._drop(peer)
                self._send(peer, Stored(existing))
                return
            receiving.bundle = self._store.incoming(push.name, push.digest, size)
            receiving.assembly = Assembly(push.files, receiving.bundle)
            if receiving.assembly.complete:
                await self._commit(peer, receiving)
                return
            self._send(peer, Credit(WINDOW))
        except (BulkError, OSError) as error:
            self._fail(peer, str(error))

    def _take(self, peer: PeerKey, piece: bytes, receiving: _Receiving, group: TaskGroup) -> None:
        if receiving.assembly is None or receiving.assembly.complete:
            raise BulkError("a chunk arrived without credit")
        receiving.assembly.add(piece)
        self.moved["received"] += len(piece)
        receiving.touched = self._clock.now()
        if receiving.assembly.complete:
            group.start_soon(self._commit, peer, receiving, name="bulk commit")
        else:
            self._send(peer, Credit(1))

    async def _commit(self, peer: PeerKey, receiving: _Receiving) -> None:
        """Sync it to disk in a thread; whatever happens, the peer is told."""
        bundle, receiving.bundle = receiving.bundle, None  # ours alone from here on
        assert bundle is not None
        try:
            ref = await anyio.to_thread.run_sync(bundle.commit)
        except (BulkError, OSError) as error:
            self._fail(peer, str(error))
        else:
            self._drop(peer)
            self._send(peer, Stored(ref))
        finally:
            bundle.discard()

    async def _drop_stalled(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now() + self._stall / 4)
            for peer, transfer in list(self._transfers.items()):
                if transfer.touched < self._clock.now() - self._stall:
                    self._fail(peer, f"no progress for {self._stall:g} s")

    def _fail(self, peer: PeerKey, reason: str) -> None:
        self._drop(peer)
        self._send(peer, TransferFailed(reason))

    def _drop(self, peer: PeerKey) -> None:
        match self._transfers.pop(peer, None):
            case _Receiving(bundle=IncomingBundle() as bundle):
                bundle.discard()
            case _Sending(pieces=pieces):
                pieces.close()  # type: ignore[attr-defined]  # the generator holds an open file

    def _send(self, peer: PeerKey, message: ToBulkClient) -> None:
        try:
            self._listener.send(peer, encode(message))
        except (PeerGone, PeerSlow):
            self._drop(peer)
