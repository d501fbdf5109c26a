"""The coordinator's Prometheus metrics. Gauges and totals are read from the core at each scrape; only waits are counted as they happen.

Labels are members, workers, runs, policies, phases and our own words: their number is bounded by who is there, and what is gone is gone
from the next scrape. Episodes, turns and free text are never labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.app.daemon import Daemon
from coordinator.app.snapshot import Snapshot
from coordinator.web.readings import Reading, Values, families, one
from tinker.protocol.to_host import Opened
from tinker.protocol.values import Edge, Phase

BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
STATES = ("queued", *map(str, Phase), "finished")


def _runs(now: Snapshot, daemon: Daemon) -> Values:
    found = Counter(run.state for run in now.runs)
    found["queued"] = len(now.queue)
    return [((state,), found[state]) for state in STATES]


def _workers(now: Snapshot, daemon: Daemon) -> Values:
    kinds = Counter(worker.kind for peer in now.peers for worker in peer.workers)
    return [((kind,), number) for kind, number in sorted(kinds.items())]


READINGS: tuple[Reading[[Snapshot, Daemon]], ...] = (
    Reading("opentinker_epoch", "Starts of this coordinator.", one(lambda now, daemon: now.epoch)),
    Reading("opentinker_uptime_seconds", "Since the daemon began.", one(lambda now, daemon: now.uptime)),
    Reading("opentinker_draining", "1 while nothing new begins.", one(lambda now, daemon: bool(now.draining))),
    Reading(
        "opentinker_journal_stuck",
        "1 while the journal cannot be written and everybody waits.",
        one(lambda now, daemon: bool(daemon.stuck)),
    ),
    Reading(
        "opentinker_lease_age_seconds",
        "Since each member was last heard.",
        lambda now, daemon: [((peer.name, peer.role), peer.lease_age) for peer in now.peers],
        ("peer", "role"),
    ),
    Reading(
        "opentinker_unreachable_seconds",
        "For how long each unreachable member has been.",
        lambda now, daemon: [((p.name, p.role), p.unreachable) for p in now.peers if p.unreachable is not None],
        ("peer", "role"),
    ),
    Reading(
        "opentinker_send_queue",
        "Frames that wait for each member because it does not read them as fast.",
        lambda now, daemon: [((name,), daemon.listener.waiting(key)) for name, key in daemon.keys.items()],
        ("peer",),
    ),
    Reading("opentinker_workers", "Workers in service.", _workers, ("kind",)),
    Reading(
        "opentinker_requests_in_flight",
        "Requests sent to each worker and not answered yet.",
        lambda now, daemon: [((each.name,), each.in_flight) for peer in now.peers for each in peer.workers],
        ("worker",),
    ),
    Reading(
        "opentinker_requests_waiting",
        "Requests for which no worker serves the version.",
        one(lambda now, daemon: sum(run.requests_waiting for run in now.runs)),
    ),
    Reading("opentinker_runs", "Runs by what they are doing.", _runs, ("state",)),
    Reading(
        "opentinker_open_turns", "Turns that are open.", one(lambda now, daemon: sum(r.turns_open for r in now.runs))
    ),
    Reading(
        "opentinker_open_episodes",
        "Episodes not accounted for.",
        one(lambda now, daemon: sum(run.episodes_open for run in now.runs)),
    ),
    Reading(
        "opentinker_run_hosts",
        "Hosts of each run, the learner host among them.",
        lambda now, daemon: [((run.run,), len(run.hosts)) for run in now.runs],
        ("run",),
    ),
    Reading(
        "opentinker_host_episodes",
        "Episodes dealt to each host and not accounted for.",
        lambda now, daemon: [((run.run, host.name), host.episodes) for run in now.runs for host in run.hosts],
        ("run", "peer"),
    ),
    Reading(
        "opentinker_groups_waiting",
        "Groups of episodes that wait for a host with room.",
        one(lambda now, daemon: sum(run.groups_waiting for run in now.runs)),
    ),
    Reading(
        "opentinker_policy_version",
        "The newest version of each policy in training.",
        lambda now, daemon: [((policy,), number) for run in now.runs for policy, number in run.versions.items()],
        ("policy",),
    ),
    Reading(
        "opentinker_policy_lag",
        "By how many versions what is played is older than the newest of each policy.",
        lambda now, daemon: [((policy,), number) for run in now.runs for policy, number in run.lags.items()],
        ("policy",),
    ),
    Reading("opentinker_turns", "Turns opened.", one(lambda now, daemon: now.counts.get("turns", 0)), counter=True),
    Reading("opentinker_messages", "Messages received.", one(lambda now, daemon: daemon.messages), counter=True),
    Reading(
        "opentinker_messages_refused",
        "Messages refused, by kind and why.",
        lambda now, daemon: [(key, number) for key, number in sorted(daemon.refusals.items())],
        ("kind", "reason"),
        counter=True,
    ),
    Reading(
        "opentinker_events",
        "Everything else the coordinator counts.",
        lambda now, daemon: [
            ((name,), number)
            for name, number in now.counts.items()
            if name != "turns" and not name.startswith("refused ")
        ],
        ("event",),
        counter=True,
    ),
)
WAITS = "opentinker_barrier_wait_seconds"
ROUNDS = "opentinker_rounds"


class Metrics(Collector):
    """All metrics of one daemon, in a registry of their own. `opened` is to be told of every barrier that opens."""

    def __init__(self, daemon: Daemon, look: Callable[[], Snapshot]) -> None:
        self._daemon = daemon
        self._look = look
        self._rounds = 0
        self.registry = CollectorRegistry()
        self._waits = Histogram(
            WAITS, "How long members waited at barriers.", ("phase", "edge"), buckets=BUCKETS, registry=self.registry
        )
        self.registry.register(self)

    def opened(self, opening: Opened) -> None:
        """Count the waits of a barrier that opened."""
        waited = self._waits.labels(str(opening.phase), str(opening.edge))
        for wait in opening.waits:
            waited.observe(wait.seconds)
        run = self._daemon.core.runs.get(opening.run)
        last = Phase.ROLLOUT if run is not None and run.updates.overlap else Phase.UPDATE
        self._rounds += (opening.phase, opening.edge) == (last, Edge.END)

    def text(self) -> bytes:
        """The page a monitor scrapes."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from families(READINGS, self._look(), self._daemon)
        yield CounterMetricFamily(
            ROUNDS, "Rounds whose updates (with max_lag: whose rollouts) have ended.", value=self._rounds
        )


def names() -> list[str]:
    """Every metric, as a monitor sees it."""
    return sorted([*(each.shown for each in READINGS), WAITS, f"{ROUNDS}_total"])
