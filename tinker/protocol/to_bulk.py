"""Messages of the data plane: one connection carries one transfer, in pieces, and never more pieces than the receiver gave credit for.

Fetch: `Fetch` ->, <- `Contents`, `Credit` ->, <- `Chunk`... with further `Credit`. Push: `Push` ->, <- `Credit`, `Chunk`... -> with further
credit, <- `Stored`. `TransferFailed` may take the place of any answer and ends the transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker.protocol.values import BlobRef


@dataclass(frozen=True, slots=True)
class FileSize:
    """One file of a bundle; `size` in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send me this bundle. Who was told of it knows its digest; to anybody else it is not there."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Push:
    """Take this bundle. `files` are in the order in which their bytes follow, sorted by name."""

    name: str
    digest: str
    files: tuple[FileSize, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bundle holds, in the order in which the bytes follow, sorted by name."""

    files: tuple[FileSize, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next bytes of the bundle's files, one after the other without a gap."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Credit:
    """You may send this many more chunks."""

    chunks: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The bundle has arrived, its digest was checked, and it is on disk."""

    ref: BlobRef


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer is over and has left nothing."""

    reason: str


ToBulkServer = Fetch | Push | Chunk | Credit
ToBulkClient = Contents | Chunk | Credit | Stored | TransferFailed
