"""Prometheus metrics as a table: each is read from what there is at the moment of a scrape, so it cannot go stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, ParamSpec

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Seen = ParamSpec("Seen")
Values = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Reading(Generic[Seen]):
    """One metric: its name, type and labels, what it means, and how it is read."""

    name: str
    help: str
    read: Callable[Seen, Values]
    labels: tuple[str, ...] = ()
    counter: bool = False

    @property
    def shown(self) -> str:
        """Its name as a monitor sees it."""
        return f"{self.name}_total" if self.counter else self.name


def one(read: Callable[Seen, float]) -> Callable[Seen, Values]:
    """A reading that has a single value, without labels."""
    return lambda *seen, **named: [((), read(*seen, **named))]


def families(readings: Iterable[Reading[Seen]], *seen: Seen.args, **named: Seen.kwargs) -> Iterator[Metric]:
    """All of them, read now."""
    for each in readings:
        family = CounterMetricFamily if each.counter else GaugeMetricFamily
        metric = family(each.name, each.help, labels=each.labels)
        for labels, value in each.read(*seen, **named):
            metric.add_metric(labels, value)
        yield metric
