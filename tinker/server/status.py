"""What a task server is doing at one moment, as its pages and monitors see it. Reading it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinker.protocol.values import PoolKind, WorkerName


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The workers of one kind that live. `capacity`: requests they serve at once; `in_flight`: jobs that were begun and are not answered,
    those that wait included; `queue`: messages in their mailboxes."""

    kind: PoolKind
    workers: int
    capacity: int
    in_flight: int
    queue: int


@dataclass(frozen=True, slots=True)
class TaskServerStatus:
    """`unready`: why it takes nothing new ("": it does). `versions`: that its workers serve. `jobs`: how many of each kind ended how.
    `moved`: bytes of bundles, by how they moved. `restarts`: of each worker, also of those that were given up."""

    unready: str
    pools: tuple[PoolStatus, ...]
    versions: int
    jobs: Mapping[tuple[str, str], int]
    moved: Mapping[str, int]
    restarts: Mapping[WorkerName, int]
