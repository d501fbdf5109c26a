"""What coordination costs: the real daemon against raw ZeroMQ processes that move the same frames and look at nothing.

    python bench/coordination.py [--repeats 5] [--only CASE ...] [--others PYTHON] [--docs docs]

Each case keeps both sides alive and measures them in turns, so that whatever else the machine does hits them alike; reported are medians of
the repeats and ratios of pairs. CPU is that of the coordinator's process, all its threads, read from its own clock. Prints markdown, and
writes the section "Coordination" of `docs/performance.md` and `docs/coordination.png` when every case has run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES = (64, 256, 1024)
TABLES = 64
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
        return cpu_of(self.process.pid)


def cpu_of(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def child(
    role: str, python: str = sys.executable, script: str = "coordination_peers.py", **arguments: object
) -> Iterator[Child]:
    """Start one, wait until it is ready, end it."""
    command = [python, str(HERE / script), role, json.dumps(arguments)]
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
def system(role: str = "daemon", **arguments: object) -> Iterator[Child]:
    """A daemon and a task server that has joined it."""
    arguments = {**PROFILE, **arguments} if role == "daemon" else arguments
    with child(role, **arguments) as daemon, child("taskserver", address=daemon.ready):
        yield daemon


PROFILE: dict[str, str] = {}
OTHERS = ""


# --- the cases ---


def turn(report: Report) -> None:
    """One turn of two seats, 64 tables at once."""
    count = 20
    with ExitStack() as stack:
        open_one = stack.enter_context
        journal = open_one(TemporaryDirectory())
        hubs = {
            "ours": open_one(system()),
            "journal": open_one(system(journal=journal)),
            "floor": open_one(system("bare_daemon")),
        }
        hosts = {name: open_one(child("turns", address=hub.ready)) for name, hub in hubs.items()}
        sides = {name: block(hub, hosts[name], count) for name, hub in hubs.items()}
        for name in ("raw", "codec"):
            relay = open_one(child("raw_relay", codec=name == "codec"))
            open_one(child("raw_server", address=relay.ready))
            sides[name] = block(relay, open_one(child("raw_turns", address=relay.ready)), count)
        taken = interleaved(report.repeats, sides)
    cpu = {name: median(each.cpu for each in samples) / count / TABLES * 1e6 for name, samples in taken.items()}
    times = {n: median(a.cpu / b.cpu for a, b in zip(taken[n], taken["raw"], strict=True)) for n in taken}
    rate = median(count * TABLES / each.seconds for each in taken["ours"])
    what = "one turn of two seats, 64 tables at once: coordinator CPU"
    report.add(what, f"{cpu['ours']:.0f} us ({rate:.0f} turns/s)", "at most 300 us", cpu["ours"] <= 300)
    against = "the same against a raw relay of the same frames"
    report.add(against, f"{times['ours']:.1f} x (raw {cpu['raw']:.0f} us)", "4 x", times["ours"] <= 4)
    codec = "of that: the blocking relay if it decodes and encodes each message, and does nothing else"
    report.add(codec, f"{times['codec']:.1f} x ({cpu['codec']:.0f} us)")
    floor = "of that: our event loop, transport and codec, without gate, versions, routing and fences"
    report.add(floor, f"{times['floor']:.1f} x ({cpu['floor']:.0f} us)")
    report.add("the same turn with a journal", f"{times['journal']:.1f} x ({cpu['journal']:.0f} us)")


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
            counts = [agents] * BARRIERS + [
                1
            ]  # the last one is the end of the rollout, which one message of ours brings about
            hub = open_one(child("raw_hub", counts=counts))
            raw = open_one(child("raw_barrier", address=hub.ready, counts=counts))
            sides["raw"] = block(hub, raw, count)
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
        child("raw_hub", counts=[CONNECTIONS]) as hub,
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
        with child("raw_hub", counts=[STORM]) as hub, ExitStack() as stack:
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


def restart(report: Report) -> None:
    """The coordinator is killed in the middle of a round and started again with its journal; how long until the round goes on."""
    taken = []
    for _ in range(report.repeats):
        with TemporaryDirectory() as journal, ExitStack() as stack:
            address = f"tcp://127.0.0.1:{free_port()}"
            with child("daemon", address=address, journal=journal) as daemon:
                stack.enter_context(child("taskserver", address=address))
                host = stack.enter_context(child("rounds", address=address, agents=64))
                host.ask(1)
                daemon.process.kill()
                daemon.process.wait()
            host.begin(1)
            began = time.monotonic()
            stack.enter_context(child("daemon", address=address, journal=journal))
            host.done()
            taken.append(time.monotonic() - began)
    report.add(
        "coordinator started again after kill -9 until a run of 64 agents has passed its next four barriers",
        f"{median(taken):.1f} s",
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def others(report: Report) -> None:
    """The same turn by actors of Ray and of xoscar over processes, if there is an interpreter that has them."""
    bars = {"ray": 10.0, "xoscar": 4.0}
    there = [
        name
        for name in bars
        if OTHERS and not subprocess.run([OTHERS, "-c", f"import {name}"], capture_output=True).returncode
    ]
    for name in bars.keys() - set(there):
        why = f"{OTHERS} does not have it" if OTHERS else "no --others PYTHON was given"
        print(f"SKIPPED: the same turn by {name}: {why}", file=sys.stderr)
        report.add(f"the same turn by {name} actors", f"not measured: {why}", f"{bars[name]:.0f} x")
    count = 3
    with ExitStack() as stack:
        daemon = stack.enter_context(system())
        sides = {"ours": block(daemon, stack.enter_context(child("turns", address=daemon.ready)), count)}
        for name in there:
            one = stack.enter_context(child(name, OTHERS, "coordination_others.py"))
            sides[name] = of_actor(one, count)
        taken = interleaved(report.repeats, sides)
    for name in there:
        pairs = list(zip(taken[name], taken["ours"], strict=True))
        faster, cpu = median(a.seconds / b.seconds for a, b in pairs), median(a.cpu / b.cpu for a, b in pairs)
        rate = median(count * TABLES / each.seconds for each in taken[name])
        measured = f"{faster:.1f} x as many turns a second as it ({rate:.0f}/s), {cpu:.1f} x less CPU of the coordinating process"
        report.add(f"the same turn by {name} actors", measured, f"{bars[name]:.0f} x", faster >= bars[name])


def of_actor(one: Child, count: int) -> Callable[[], Sample]:
    """Its `ready` is the process of the coordinator actor."""

    def measure() -> Sample:
        before = cpu_of(one.ready)
        seconds = one.ask(count)["seconds"]
        return Sample(cpu_of(one.ready) - before, seconds)

    return measure


CASES = {each.__name__: each for each in (turn, others, barrier, connections, storm, kill, restart, memory)}


# --- the report ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--others", default="", metavar="PYTHON", help="an interpreter that has ray and xoscar")
    parser.add_argument("--profile", default="", help="file for cProfile of the daemon")
    options = parser.parse_args()
    if options.profile:
        PROFILE["profile"] = options.profile
    global OTHERS
    OTHERS = options.others
    report = Report(options.repeats)
    print("| what | measured | bar | reached |\n|---|---|---|---|")
    for name in options.only:
        CASES[name](report)
    if list(options.only) == list(CASES):
        write(report, options.docs)


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
