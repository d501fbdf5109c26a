"""What a slow agent costs the others: four agents, one ten times slower to update, 10 rounds, by barrier policy and `max_lag`.

    python bench/lag.py [--rounds 10] [--docs docs]

The real coordinator, task server and host in one process, over memory, with the scripted engine: an update takes 0.3 s, one of the slow
agent 3 s, and a generation as long as a case says. Reported is the share of wall time that the three fast agents waited at barriers (their
mean), with how often each agent learned. Prints markdown, and writes the section of `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import structlog

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from coordinator.app.config import config_text, resolve
from coordinator.app.daemon import Daemon
from coordinator.app.findings import total, trained
from coordinator.app.lag_report import overlaps, waited_share
from coordinator.app.local import Play, RunRequest
from coordinator.app.progress import Silent
from coordinator.app.rundir import RunDirectory, read_metrics
from coordinator.core.coordinator import Coordinator
from scenarios import Scores, Table, scenario
from tinker.engines.scripted import ScriptedEngine
from tinker.models import DEMO
from tinker.protocol.batches import Row
from tinker.protocol.values import LoraSpec, LossSpec, ModelCard, PeerName, PolicyName
from tinker.runtime.bulk import BULK_LIMITS, BulkClient, BulkServer, BundleStore
from tinker.runtime.clock import MonotonicClock
from tinker.runtime.transport import MemoryNetwork
from tinker.server.taskserver import TaskServer
from tinker.tokens import Tokenizer, check_model_dir

ROOT = Path(__file__).resolve().parent.parent
TITLE = "## A slow agent"
FAST, SLOW = 0.3, 3.0  # seconds of an update
AGENTS = ("ann", "bob", "cy", "slow")
BAR = 0.15
TOKENIZER = Tokenizer.from_dir(DEMO)
FACTS = check_model_dir(DEMO)
CARD = ModelCard(
    FACTS.name, "scripted", TOKENIZER.digest, FACTS.vocab, FACTS.context, TOKENIZER.eos_ids, LoraSpec().targets
)


@scenario(*AGENTS, version=1, defaults={"learning": {"max_tokens": 4}})
async def four(table: Table) -> Scores:
    """Each says a digit once and scores it."""
    said = await table.act_all("A digit:", int)
    return {seat: value if isinstance(value, int) else 0 for seat, value in said.items()}


class Slow(ScriptedEngine):
    """An update takes as long as its agent's does; `generation` seconds pass before each answer."""

    def __init__(self, generation: float) -> None:
        replies = [[*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]] for text in "123"]
        super().__init__(CARD, replies, latency=generation)

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        await anyio.sleep(SLOW if policy.endswith("slow") else FAST)
        return await super().forward_backward(policy, rows, loss)


@dataclass(frozen=True)
class Case:
    """A run: how long a rollout takes, what the configuration says, and whether the bar is for it."""

    name: str
    rollout: float
    given: dict[str, Any] = field(default_factory=dict)
    bar: bool = False


def drop(barrier: str, deadline: float) -> dict[str, Any]:
    return {"barriers": {barrier: {"deadline": deadline, "straggler": "drop"}}}


LAG = {"learning": {"max_lag": 2}}
CASES = (
    Case("`wait`", 3.3),
    Case("`drop` at the end of updates, after 0.8 s", 3.3, drop("update_end", 0.8), bar=True),
    Case("`max_lag = 2`", 3.3, LAG, bar=True),
    Case("`wait`", 0.9),
    Case("`max_lag = 2`", 0.9, LAG),
    Case(
        "`max_lag = 2`, the slow one updates every 4th round",
        0.9,
        LAG | {"agents": {"slow": {"learning": {"every": 4}}}},
    ),
)


@asynccontextmanager
async def system(place: Path, generation: float) -> AsyncIterator[tuple[MemoryNetwork, str]]:
    """A coordinator and a task server that has joined it."""
    network, clock = MemoryNetwork(), MonotonicClock()
    listener = network.listen("coordinator")
    daemon = Daemon(Coordinator(PeerName("coordinator")), listener, clock, grace=0.1)
    joined = anyio.Event()
    data = network.listen("data", BULK_LIMITS)
    store = BundleStore(place / "spool", data.address)
    bulk = BulkClient(partial(network.connect, limits=BULK_LIMITS), machine=store.machine)
    async with Slow(generation) as engine, anyio.create_task_group() as tasks:
        parts = (
            engine,
            TOKENIZER.bundle(),
            network.connect("coordinator"),
            store,
            BulkServer(store, data),
            bulk,
            clock,
            1,
        )
        server = TaskServer(PeerName("server"), *parts, on_joined=joined.set)
        tasks.start_soon(daemon.serve, name="daemon")
        tasks.start_soon(server.serve, name="task server")
        await joined.wait()
        yield network, listener.address
        tasks.cancel_scope.cancel()


async def measured(case: Case, rounds: int) -> list[dict[str, Any]]:
    """The rows of one run."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        async with system(place, case.rollout) as (network, address):
            given = {"rounds": rounds, "groups": 2, "group_size": 8, "evaluate_every": 0, "engine": "scripted"}
            config = resolve(four.defaults, given, case.given, {"scenario": four.name})
            directory = RunDirectory.create(place / "run", four.name, config_text(config))
            play = Play(RunRequest(config, four, directory, address), Silent(), MonotonicClock(), network)
            play.draw = lambda rows, headline: None
            exit = await play.run()
            if exit.code:
                raise SystemExit(f"{case.name}: {exit.detail}")
            return list(read_metrics(directory.path))


def line(case: Case, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    mine = {agent: trained(rows, agent) for agent in AGENTS}
    waited = fmean(waited_share(mine[agent]) or 0.0 for agent in AGENTS[:-1])
    wall = total(mine["ann"], "seconds/round")
    updates = {agent: int(total(mine[agent], "stepped")) for agent in AGENTS}
    lag = next(
        (f"{each.lag_mean:.1f}" for each in overlaps(rows) if each.agent == "slow" and each.lag_mean is not None), ""
    )
    reached = "" if not case.bar else "yes" if waited < BAR else "**no**"
    return (
        f"{case.rollout:g} s", case.name, f"{wall:.1f} s", f"{waited:.1%}", reached,
        f"{min(updates[agent] for agent in AGENTS[:-1])}", f"{updates['slow']}", lag,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    head = ("a rollout takes", "policy", f"{options.rounds} rounds took", "fast agents waited", f"under {BAR:.0%}",
            "updates of a fast agent", "of the slow one", "age of its tokens")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for case in CASES:
        lines.append(line(case, asyncio.run(measured(case, options.rounds))))
        print(f"| {' | '.join(lines[-1])} |", flush=True)
    write(options.docs, lines)


def write(docs: Path, lines: list[tuple[str, ...]]) -> None:
    """The section of the page."""
    page = docs / "performance.md"
    table = "\n".join(f"| {' | '.join(each)} |" for each in lines)
    section = (
        f"{TITLE}\n\nWritten by `bench/lag.py`: {os.cpu_count()} cores, Python {platform.python_version()}, load "
        f"{os.getloadavg()[0]:.1f} at the end. Four agents, one of which takes {SLOW:g} s to update and the others {FAST:g} s; scripted "
        f"engine. What the fast agents waited is their time at barriers, as a share of wall time.\n\n{table}\n\n"
        "With `drop` at the end of updates a slow agent is left out of every update: it never learns. With `max_lag` it learns from every "
        "round as long as it keeps up on average; where rollouts are shorter than its updates nobody can be faster than it, unless it "
        "updates less often.\n"
    )
    before = page.read_text()
    head, _, rest = before.partition(TITLE)
    after = rest.partition("\n## ")
    page.write_text(head.rstrip() + "\n\n" + section + ("\n## " + after[2] if after[1] else ""))


if __name__ == "__main__":
    main()
