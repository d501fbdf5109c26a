"""The pages of a task server: health and metrics. They are there before its model is loaded; then there is nothing to count yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette

from coordinator.web.pages import pages
from coordinator.web.readings import Reading, Values, families, one
from tinker.server.status import PoolStatus, TaskServerStatus

Look = Callable[[], TaskServerStatus | None]
LOADING = "its model is being loaded"


def _pools(read: Callable[[PoolStatus], float]) -> Callable[[TaskServerStatus], Values]:
    return lambda now: [((str(pool.kind),), read(pool)) for pool in now.pools]


READINGS: tuple[Reading[[TaskServerStatus]], ...] = (
    Reading("opentinker_taskserver_ready", "1 while it takes what is new.", one(lambda now: not now.unready)),
    Reading("opentinker_taskserver_workers", "Workers that live.", _pools(lambda pool: pool.workers), ("kind",)),
    Reading(
        "opentinker_taskserver_capacity",
        "Requests that the workers serve at once.",
        _pools(lambda pool: pool.capacity),
        ("kind",),
    ),
    Reading(
        "opentinker_taskserver_in_flight",
        "Jobs that were begun and are not answered, those that wait included.",
        _pools(lambda pool: pool.in_flight),
        ("kind",),
    ),
    Reading(
        "opentinker_taskserver_queue",
        "Messages that wait for a worker to take them.",
        _pools(lambda pool: pool.queue),
        ("kind",),
    ),
    Reading("opentinker_taskserver_versions", "Versions that its workers serve.", one(lambda now: now.versions)),
    Reading(
        "opentinker_taskserver_jobs",
        "Jobs that have ended, by what they were and how they ended.",
        lambda now: sorted(now.jobs.items()),
        ("job", "outcome"),
        counter=True,
    ),
    Reading(
        "opentinker_taskserver_bundle_bytes",
        "Bytes of bundles, by how they moved.",
        lambda now: [((how,), number) for how, number in sorted(now.moved.items())],
        ("how",),
        counter=True,
    ),
    Reading(
        "opentinker_taskserver_restarts",
        "Restarts of each worker.",
        lambda now: [((worker,), number) for worker, number in now.restarts.items()],
        ("worker",),
        counter=True,
    ),
)


class _Metrics(Collector):
    def __init__(self, look: Look) -> None:
        self._look = look

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now = self._look()
        return families(READINGS, now) if now is not None else ()


def application(look: Look) -> Starlette:
    """All pages. `look`: what the task server is doing (None: it is not there yet)."""
    registry = CollectorRegistry()
    registry.register(_Metrics(look))

    def unready() -> str:
        now = look()
        return LOADING if now is None else now.unready

    return pages(unready, lambda: generate_latest(registry), {})


def names() -> list[str]:
    """Every metric, as a monitor sees it."""
    return sorted(each.shown for each in READINGS)
