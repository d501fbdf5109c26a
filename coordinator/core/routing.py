"""Which rollout worker gets a request: one that serves the version; sticky per (episode, seat), else the least loaded, ties by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tinker.protocol.values import WorkerName


def choose(
    serving: Collection[WorkerName], sticky: WorkerName | None, in_flight: Mapping[WorkerName, int]
) -> WorkerName | None:
    """The worker for one request, or None if nobody serves the version. `in_flight` counts requests sent and not yet answered."""
    if sticky in serving:
        return sticky
    return min(sorted(serving), key=lambda worker: (in_flight.get(worker, 0), worker), default=None)
