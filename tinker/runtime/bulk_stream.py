"""A bundle's bytes as a stream of chunks: cut on one end, put together on the other, with the same order of files on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import IO

from tinker.protocol.to_bulk import FileSize
from tinker.protocol.values import BlobRef
from tinker.runtime.bundles import BulkError, BundleCorrupt, BundleDigest, Writer, check_digest, check_name
from tinker.runtime.transport import Limits

CHUNK = 256 * 1024  # bytes
WINDOW = 8  # chunks under way
BULK_LIMITS = Limits(frame=1024 * 1024, queue=64)  # for both ends of a bulk connection


def pieces_of(files: tuple[FileSize, ...], source: Callable[[str], IO[bytes]]) -> Iterator[bytes]:
    """The files' bytes in chunks; no chunk spans two files."""
    for file in files:
        with source(file.name) as stream:
            left = file.size
            while left:
                data = stream.read(min(CHUNK, left))
                if not data:
                    raise BundleCorrupt(f"{file.name} ended {left} bytes early")
                left -= len(data)
                yield data


class Assembly:
    """Cuts arriving bytes into the announced files."""

    def __init__(self, files: tuple[FileSize, ...], writer: Writer) -> None:
        names = [check_name(file.name) for file in files]
        if names != sorted(set(names)) or any(file.size < 0 for file in files):
            raise BulkError("a bundle's files must be announced once each, sorted by name, with their sizes")
        self._writer = writer
        self._coming = iter(files)
        self._left = 0  # bytes of the current file
        self.complete = False
        self._advance()

    def add(self, data: bytes) -> None:
        rest = memoryview(data)
        while len(rest):
            if self.complete:
                raise BulkError("more bytes arrived than were announced")
            part = rest[: self._left]
            self._writer.add(part)
            self._left -= len(part)
            rest = rest[len(part) :]
            self._advance()

    def _advance(self) -> None:
        """On to the next file that still wants bytes."""
        while not self._left:
            file = next(self._coming, None)
            if file is None:
                self.complete = True
                return
            self._writer.begin(file.name, file.size)
            self._left = file.size


class InMemory:
    """A bundle that arrives in memory."""

    def __init__(self) -> None:
        self._streams: dict[str, BytesIO] = {}
        self._digest = BundleDigest()
        self._current = BytesIO()

    def begin(self, name: str, size: int) -> None:
        self._current = self._streams[name] = BytesIO()
        self._digest.begin(name, size)

    def add(self, data: bytes | memoryview) -> None:
        self._current.write(data)
        self._digest.add(data)

    def verified(self, ref: BlobRef) -> dict[str, bytes]:
        check_digest(ref.name, self._digest.hex(), ref.digest)
        return {name: stream.getvalue() for name, stream in self._streams.items()}
