"""What coordination costs: the real daemon against raw ZeroMQ processes that move the same frames and look at nothing.

    python bench/coordination.py [--repeats 5] [--only turn barrier connections storm kill memory] [--docs docs]

Each case keeps both sides alive and measures them in turns, so that whatever else the machine does hits them alike; reported are medians of
the repeats and ratios of pairs. CPU is that of the coordinator's process, all its threads, read from its own clock. Prints markdown, and
writes the section "Coordination" of `docs/performance.md` and `docs/coordination.png` when every case has run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES = (64, 256, 1024)
CONNECTIONS = 256
STORM, STORM_PROCESSES = 1024, 4
BARRIERS = 3  # of all agents, in one round
TITLE = "## Coordination"


@dataclass
class Child:
    """One process of `coordination_peers.py`. `ask`: do it so often; returns what it measured."""

    process: subprocess.Popen[str]
    ready: Any = None

    def ask(self, count: int) -> dict[str, Any]:
        self.begin(count)
        return self.done()

    def begin(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()

    def done(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended early")
        measured: dict[str, Any] = json.loads(line)
        return measured

    @property
    def cpu(self) -> float:
        """Seconds of CPU so far, of all its threads, from the clock of the process itself (Linux)."""
        return time.clock_gettime((~self.process.pid << 3) | 2)


@contextmanager
def child(role: str, **arguments: object) -> Iterator[Child]:
    """Start one, wait until it is ready, end it."""
    command = [sys.executable, str(HERE / "coordination_peers.py"), role, json.dumps(arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        one = Child(process)
        one.ready = one.done()["ready"]
        yield one
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass(frozen=True)
class Sample:
    """One repeat of one side: coordinator CPU seconds, and wall seconds as the peer saw them."""

    cpu: float
    seconds: float


def interleaved(repeats: int, sides: dict[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
    """Each side once unmeasured, then in turns."""
    for measure in sides.values():
        measure()
    taken: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, measure in sides.items():
            taken[name].append(measure())
    return taken


def block(hub: Child, peer: Child, count: int) -> Callable[[], Sample]:
    def measure() -> Sample:
        before = hub.cpu
        seconds = peer.ask(count)["seconds"]
        return Sample(hub.cpu - before, seconds)

    return measure


@dataclass
class Report:
    """`lines`: rows of the table (what, measured, bar, reached). `curves`: label -> (N, us per agent and barrier)."""

    repeats: int
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, what: str, measured: str, bar: str = "reported", reached: bool | None = None) -> None:
        self.lines.append((what, measured, bar, {None: "", True: "yes", False: "**no**"}[reached]))
        print(f"| {' | '.join(self.lines[-1])} |", flush=True)


@contextmanager
def system() -> Iterator[Child]:
    """A daemon and a task server that has joined it."""
    with child("daemon", **PROFILE) as daemon, child("taskserver", address=daemon.ready):
        yield daemon


PROFILE: dict[str, str] = {}


# --- the cases ---


def turn(report: Report) -> None:
    """One turn of two seats, 64 tables at once."""
    count, tables = 20, 64
    with (
        system() as daemon,
        child("turns", address=daemon.ready) as host,
        child("raw_relay") as relay,
        child("raw_server", address=relay.ready),
        child("raw_turns", address=relay.ready) as raw,
    ):
        taken = interleaved(report.repeats, {"ours": block(daemon, host, count), "raw": block(relay, raw, count)})
    ours = median(each.cpu for each in taken["ours"]) / count / tables * 1e6
    raw_cpu = median(each.cpu for each in taken["raw"]) / count / tables * 1e6
    ratio = median(a.cpu / b.cpu for a, b in zip(taken["ours"], taken["raw"], strict=True))
    rate = median(count * tables / each.seconds for each in taken["ours"])
    what = "one turn of two seats, 64 tables at once: coordinator CPU"
    report.add(what, f"{ours:.0f} us ({rate:.0f} turns/s)", "at most 300 us", ours <= 300)
    report.add(
        "the same against a raw relay of the same frames", f"{ratio:.1f} x ({raw_cpu:.0f} us)", "4 x", ratio <= 4
    )


def barrier(report: Report) -> None:
    """All agents of one run in one process: one message with all arrivals, and a message for each."""
    bars = {64: 1.0, 256: 1.0, 1024: 0.7}
    for agents in SIZES:
        count = max(2, 1500 // agents)
        with ExitStack() as stack:
            open_one = stack.enter_context
            sides = {}
            for name, coalesced in (("coalesced", True), ("each", False)):
                daemon = open_one(system())
                host = open_one(child("rounds", address=daemon.ready, agents=agents, coalesced=coalesced))
                sides[name] = block(daemon, host, count)
            hub = open_one(child("raw_hub", count=agents))
            raw = open_one(child("raw_barrier", address=hub.ready, agents=agents))
            sides["raw"] = block(hub, raw, count * BARRIERS)
            taken = interleaved(report.repeats, sides)
        for name, samples in taken.items():
            cost = median(each.cpu for each in samples) / (count * BARRIERS * agents) * 1e6
            report.curves.setdefault(name, []).append((agents, cost))
        rates = {name: median(count * BARRIERS / s.seconds for s in samples) for name, samples in taken.items()}
        pairs = {n: median(r.seconds / s.seconds for s, r in zip(taken[n], taken["raw"], strict=True)) for n in taken}
        speeds = f"({rates['coalesced']:.0f}/s, raw {rates['raw']:.0f}/s; a message for each: {pairs['each']:.2f} x)"
        what = f"barrier of {agents} agents of one process: rate against raw"
        least = bars[agents]
        report.add(what, f"{pairs['coalesced']:.2f} x {speeds}", f"{least:.1f} x", pairs["coalesced"] >= least)
        costs = {name: curve[-1][1] for name, curve in report.curves.items()}
        report.add(
            f"barrier of {agents} agents of one process: coordinator CPU for each",
            f"{costs['coalesced']:.2f} us (raw {costs['raw']:.2f} us; a message for each: {costs['each']:.1f} us)",
            "at most 1.5 us" if agents >= 256 else "reported",
            costs["coalesced"] <= 1.5 if agents >= 256 else None,
        )


def connections(report: Report) -> None:
    """256 hosts, each with a connection, a run and an agent of its own; four barriers to a round."""
    count = 3
    with (
        system() as daemon,
        child("connections", address=daemon.ready, count=CONNECTIONS) as hosts,
        child("raw_hub", count=CONNECTIONS) as hub,
        child("raw_connections", address=hub.ready, count=CONNECTIONS) as raw,
    ):
        sides = {"ours": block(daemon, hosts, count), "raw": block(hub, raw, 4 * count)}
        taken = interleaved(report.repeats, sides)
    per = {name: median(s.cpu for s in samples) / (4 * count * CONNECTIONS) * 1e6 for name, samples in taken.items()}
    ratio = median(a.cpu / b.cpu for a, b in zip(taken["ours"], taken["raw"], strict=True))
    report.add(
        f"barrier of {CONNECTIONS} connections: coordinator CPU against raw",
        f"{ratio:.2f} x ({per['ours']:.0f} us for each connection, raw {per['raw']:.0f} us)",
        "at most 1.3 x",
        ratio <= 1.3,
    )


def storm(report: Report) -> None:
    """1,024 connections at once."""
    each = STORM // STORM_PROCESSES
    seconds: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(report.repeats):
        with system() as daemon, ExitStack() as stack:
            names = [f"p{k}-" for k in range(STORM_PROCESSES)]
            crowd = [stack.enter_context(child("storm", address=daemon.ready, count=each, name=n)) for n in names]
            seconds["ours"].append(at_once(crowd))
        with child("raw_hub", count=STORM) as hub, ExitStack() as stack:
            opened = [child("raw_connections", address=hub.ready, count=each, late=True) for _ in names]
            seconds["raw"].append(at_once([stack.enter_context(one) for one in opened]))
    ours, raw = median(seconds["ours"]), median(seconds["raw"])
    what = f"{STORM} connections join, submit, attach an agent and pass a first barrier"
    report.add(what, f"{ours:.2f} s (raw, only a barrier: {raw:.2f} s)")


def at_once(crowd: list[Child]) -> float:
    began = time.perf_counter()
    for one in crowd:
        one.begin(1)
    for one in crowd:
        one.done()
    return time.perf_counter() - began


def kill(report: Report) -> None:
    """A host is killed; how long until the task server is told to release its run."""
    taken = []
    for _ in range(report.repeats):
        with (
            child("daemon") as daemon,
            child("taskserver", address=daemon.ready) as server,
            child("rounds", address=daemon.ready, agents=2) as host,
        ):
            host.ask(1)
            began = time.monotonic()
            os.kill(host.process.pid, signal.SIGKILL)
            taken.append((server.done()["released"] - began) * 1e3)
    report.add("kill -9 of a host until its run is released at the task server", f"{median(taken):.1f} ms")


def memory(report: Report) -> None:
    """An idle actor; the coordinator before and after 10,000 episodes."""
    with child("actors") as actors:
        kb = median(actors.ask(5000)["kb"] for _ in range(1))
    report.add("resident memory of an idle actor", f"{kb:.1f} kB", "at most 6 kB", kb <= 6)
    with system() as daemon, child("rounds", address=daemon.ready, agents=2, episodes=250) as host:
        sizes = []
        for _ in range(3):
            host.ask(20)
            sizes.append(resident(daemon.process.pid) / 1e6)
            host.ask(20)
    grown = (sizes[2] - sizes[1]) * 1e3
    report.add(
        "coordinator's resident memory after 5,000, 15,000 and 25,000 episodes without turns",
        f"{sizes[0]:.1f}, {sizes[1]:.1f}, {sizes[2]:.1f} MB",
        "none of 10,000 kept",
        grown < 200,
    )


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CASES = {each.__name__: each for each in (turn, barrier, connections, storm, kill, memory)}


# --- the report ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--profile", default="", help="file for cProfile of the daemon")
    options = parser.parse_args()
    if options.profile:
        PROFILE["profile"] = options.profile
    report = Report(options.repeats)
    print("| what | measured | bar | reached |\n|---|---|---|---|")
    for name in options.only:
        CASES[name](report)
    report.add("the same turn by Ray and by xoscar actors", *peers())
    if list(options.only) == list(CASES):
        write(report, options.docs)


def peers() -> tuple[str, str]:
    """Which of them could be measured. Nothing here depends on them."""
    there = [name for name in ("ray", "xoscar") if importlib.util.find_spec(name)]
    return (f"not measured ({', '.join(there)} installed)" if there else "not installed"), "10 x, 4 x"


def write(report: Report, docs: Path) -> None:
    """The section of the page, and the plot."""
    page = docs / "performance.md"
    before = page.read_text() if page.exists() else "# Performance\n"
    rows = "\n".join(f"| {' | '.join(line)} |" for line in report.lines)
    section = (
        f"{TITLE}\n\nWritten by `bench/coordination.py`: {os.cpu_count()} cores, Python {platform.python_version()}, load "
        f"{os.getloadavg()[0]:.1f} at the end, median of {report.repeats} repeats, ours and raw in turns. Raw is a blocking ROUTER that "
        f"looks at nothing, with frames of the same sizes; CPU is that of the coordinator's process.\n\n"
        f"| what | measured | bar | reached |\n|---|---|---|---|\n{rows}\n\n"
        f"![CPU for each agent and barrier against the number of agents](coordination.png)\n"
    )
    head, _, rest = before.partition(TITLE)
    after = rest.partition("\n## ")
    page.write_text(head.rstrip() + "\n\n" + section + ("\n## " + after[2] if after[1] else ""))
    plot(report, docs / "coordination.png")


def plot(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    words = {
        "coalesced": "one message with all arrivals",
        "each": "a message for each agent",
        "raw": "raw ZeroMQ, a frame for each",
    }
    for name, points in report.curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=words[name])
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="agents of one run in one process",
        ylabel="coordinator CPU, us per agent and barrier",
    )
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
