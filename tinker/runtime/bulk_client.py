"""The asking end of the data plane: get a bundle from where it lies, or put one there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from io import BytesIO

import anyio

from tinker.protocol.to_bulk import Chunk, Contents, Credit, Fetch, FileSize, Push, Stored, ToBulkClient, TransferFailed
from tinker.protocol.values import BlobRef
from tinker.runtime.bulk_stream import WINDOW, Assembly, InMemory, pieces_of
from tinker.runtime.bundles import BulkError, BundleCorrupt, check_name, digest_of, machine_id, read_bundle
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.transport import Connection, TransportError


class BulkClient:
    """Gets bundles and sends them. `connect` opens a connection to an endpoint (with BULK_LIMITS); each transfer has one of its own.

    BulkError when a transfer fails, or when the other end says nothing for `stall` seconds; both calls may simply be made again.
    `moved`: bytes of whole bundles that were fetched from elsewhere, pushed, or read from a file of this machine.
    """

    def __init__(self, connect: Callable[[str], Connection], *, machine: str = "", stall: float = 60.0) -> None:
        self._connect = connect
        self._machine = machine or machine_id()
        self._stall = stall
        self.moved: Counter[str] = Counter()

    async def fetch(self, ref: BlobRef) -> dict[str, bytes]:
        """The bundle's files, verified: by file if it lies on this machine, else from its endpoint."""
        if ref.machine == self._machine and await anyio.Path(ref.path).is_dir():
            files = await anyio.to_thread.run_sync(read_bundle, ref)
            self.moved["read"] += ref.size
            return files
        if not ref.endpoint:
            raise BulkError(
                f"bundle {ref.name} is not on this machine ({self._machine}) and no endpoint serves it: {ref}"
            )
        connection = self._connect(ref.endpoint)
        try:
            files = await self._fetch(connection, ref)
            self.moved["fetched"] += ref.size
            return files
        except TransportError as error:
            raise BulkError(f"bundle {ref.name} did not come from {ref.endpoint}: {error}") from error
        finally:
            await connection.aclose()

    async def push(self, endpoint: str, name: str, files: Mapping[str, bytes]) -> BlobRef:
        """Store the files as a bundle at the endpoint; its BlobRef there. Pushing the same again is fine."""
        for file in (name, *files):
            check_name(file)
        digest = await anyio.to_thread.run_sync(digest_of, files)
        connection = self._connect(endpoint)
        try:
            return await self._push(connection, endpoint, name, digest, files)
        except TransportError as error:
            raise BulkError(f"bundle {name} did not get to {endpoint}: {error}") from error
        finally:
            await connection.aclose(grace=0)

    async def _fetch(self, connection: Connection, ref: BlobRef) -> dict[str, bytes]:
        connection.send(encode(Fetch(ref.name, ref.digest)))
        contents = await self._answer(connection, ref.endpoint)
        if not isinstance(contents, Contents):
            raise BulkError(f"{ref.endpoint} answered a fetch with {type(contents).__name__}")
        if (size := sum(file.size for file in contents.files)) != ref.size:
            raise BundleCorrupt(f"{ref.endpoint} offers {size} bytes as bundle {ref.name}, expected {ref.size}")
        arrived = InMemory()
        assembly = Assembly(contents.files, arrived)
        connection.send(encode(Credit(WINDOW)))
        while not assembly.complete:
            match await self._answer(connection, ref.endpoint):
                case Chunk(data=data):
                    assembly.add(data)
                    connection.send(encode(Credit(1)))
                case other:
                    raise BulkError(f"{ref.endpoint} sent {type(other).__name__} in the middle of bundle {ref.name}")
        return arrived.verified(ref)

    async def _push(
        self, connection: Connection, endpoint: str, name: str, digest: str, files: Mapping[str, bytes]
    ) -> BlobRef:
        listing = tuple(FileSize(file, len(files[file])) for file in sorted(files))
        pieces = pieces_of(listing, lambda file: BytesIO(files[file]))
        connection.send(encode(Push(name, digest, listing)))
        while True:
            match await self._answer(connection, endpoint):
                case Credit(chunks=chunks):
                    for _, piece in zip(range(chunks), pieces, strict=False):
                        connection.send(encode(Chunk(piece)))
                case Stored(ref=ref):
                    self.moved["pushed"] += ref.size
                    return ref
                case other:
                    raise BulkError(f"{endpoint} answered a push with {type(other).__name__}")

    async def _answer(self, connection: Connection, endpoint: str) -> ToBulkClient:
        """The next message; TransferFailed becomes the error it is."""
        try:
            with anyio.fail_after(self._stall):
                data = await connection.receive()
        except TimeoutError:
            raise BulkError(
                f"{endpoint} said nothing for {self._stall:g} s: is its task server or host alive?"
            ) from None
        try:
            message: ToBulkClient = decode(data, ToBulkClient)
        except WireError as error:
            raise BulkError(f"{endpoint} sent no message of the data plane: {error}") from error
        if isinstance(message, TransferFailed):
            raise BulkError(f"{endpoint} refused: {message.reason}")
        return message
