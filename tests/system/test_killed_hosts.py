"""Real processes, one run, several hosts: one is killed or told to leave in the middle of a round, or the learner host is killed."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from system_processes import SCRIPTED, Machine, Program, machine, wait_until

from scenarios import read_recordings
from tinker.protocol.episodes import Recording

pytestmark = pytest.mark.timeout(240)

GROUPS, SIZE = 6, 2
SMALL = ("--set", "evaluate_every=0", "--set", f"groups={GROUPS}", "--set", f"group_size={SIZE}")
FEW = ("--set", "concurrency=3")  # so that there is something left for others
SCENARIO = """
import anyio
from scenarios import Scores, Table, scenario

@scenario("ann", "bob", version=1, defaults={"learning": {"max_tokens": 4}})
async def slow(table: Table) -> Scores:
    \"\"\"Both say yes or no, which takes a while.\"\"\"
    bonus = table.rng.random()
    await anyio.sleep(0.2)
    first = await table.act_all("yes or no?", str)
    await anyio.sleep(0.2)
    second = await table.act_all("again:", str)
    return {seat: len(str(first[seat])) + bonus * len(str(second[seat])) for seat in ("ann", "bob")}
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


@dataclass
class Cluster:
    """A coordinator with a task server. `further`: hosts by name."""

    here: Machine
    further: dict[str, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.here.place / "slow.py").write_text(SCENARIO)
        self.coordinator = self.here.start("coordinator", "--bind", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0")
        self.address = self.coordinator.ready()
        self.page = json.loads(self.coordinator.out.read_text().splitlines()[0])["http"]
        self.server = self.here.start("taskserver", "--coordinator", self.address, *SCRIPTED, "--name", "server")
        self.server.ready()

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.page}/status.json", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def learn(self, out: str, *more: str) -> Program:
        """A run that has been admitted."""
        arguments = ("--coordinator", self.address, *SMALL, *more, "--out", out)
        host = self.here.start("run", "slow.py", *arguments)
        wait_until(lambda: bool(self.status()["runs"]) or host.over, host.story)
        return host

    def help(self, *names: str) -> None:
        """Further hosts of the run."""
        (run,) = self.status()["runs"]
        for name in names:
            arguments = ("--run", run["run"], "--coordinator", self.address, "--name", name)
            self.further[name] = self.here.start("host", "slow.py", *arguments)
        for program in self.further.values():
            program.ready()

    def stop_playing(self, name: str) -> None:
        """Stop this further host while it has episodes in hand that it has not played."""

        def inside() -> bool:
            self.further[name].signal(signal.SIGSTOP)
            hosts = [host for run in self.status()["runs"] for host in run["hosts"] if host["name"] == name]
            if any(host["episodes"] > host["delivered"] for host in hosts):
                return True
            self.further[name].signal(signal.SIGCONT)
            time.sleep(0.005)  # another moment
            return False

        wait_until(inside, self.coordinator.story)


def recordings(here: Machine, run: str) -> list[Recording]:
    """All of a run, without the run's name."""
    files = sorted((here.place / run / "recordings").glob("*.jsonl"))
    return [replace(recording, run="") for file in files for recording in read_recordings(file)]


def numbers(here: Machine, run: str) -> list[dict[str, Any]]:
    """The rows without what depends on the clock."""
    timed = ("seconds", "wait/", "tokens_per_second", "coordinator_cpu")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in here.rows(run)]


def assert_each_once(here: Machine, run: str, rounds: int) -> None:
    """The recordings hold every episode of these rounds once, and so do the rows."""
    found = Counter(recording.episode for recording in recordings(here, run) if recording.episode.round <= rounds)
    assert set(found.values()) == {1}
    assert len(found) == rounds * GROUPS * SIZE
    told = [(row["round"], row["agent"], row["episodes"], row["failed"]) for row in here.rows(run)]
    assert told == [(round, agent, GROUPS * SIZE, 0) for round in range(1, rounds + 1) for agent in ("ann", "bob")]


def test_a_further_host_that_is_killed_in_the_middle_of_a_round_costs_nothing_but_time(here: Machine) -> None:
    cluster, rounds = Cluster(here), 12
    host = cluster.learn("run", *FEW, "--rounds", str(rounds))
    cluster.help("ann", "bob")
    cluster.stop_playing("ann")
    cluster.further["ann"].signal(signal.SIGKILL)
    assert cluster.further["ann"].wait() == -signal.SIGKILL
    wait_until(lambda: cluster.status()["counts"].get("episodes dealt again", 0) > 0, cluster.coordinator.story)
    assert host.wait() == 0, host.story() + cluster.coordinator.story()
    bob = cluster.further["bob"]
    assert bob.wait() == 0, bob.story()
    assert_each_once(here, "run", rounds)
    alone = cluster.learn("alone", "--rounds", str(rounds))
    assert alone.wait() == 0, alone.story()
    assert recordings(here, "alone") == recordings(here, "run")
    assert numbers(here, "alone") == numbers(here, "run")
    for each in (cluster.coordinator, cluster.server, host, bob):
        assert "Traceback" not in each.err.read_text()


def test_a_further_host_that_is_told_to_leave_plays_what_it_has(here: Machine) -> None:
    cluster = Cluster(here)
    host = cluster.learn("run", *FEW, "--rounds", "100000")
    cluster.help("ann")
    ann = cluster.further["ann"]
    cluster.stop_playing("ann")
    ann.signal(signal.SIGTERM)
    ann.signal(signal.SIGCONT)
    assert ann.wait() == 0, ann.story()
    assert "hands back" not in ann.err.read_text()
    assert "episodes dealt again" not in cluster.status()["counts"]
    rounds = len(here.rows()) // 2 + 1
    wait_until(lambda: len(here.rows()) >= 2 * rounds, host.story)
    host.signal(signal.SIGINT)
    assert host.wait() == 0, host.story()
    assert_each_once(here, "run", len(here.rows()) // 2)


def test_with_a_killed_learner_host_the_run_is_over_and_named_and_the_next_one_starts(here: Machine) -> None:
    cluster = Cluster(here)
    host = cluster.learn("run", *FEW, "--rounds", "100000")
    cluster.help("ann")
    wait_until(lambda: bool(here.rows()), host.story)
    (run,) = cluster.status()["runs"]
    host.signal(signal.SIGKILL)
    host.wait()
    ann = cluster.further["ann"]
    assert ann.wait() == 3, ann.story()
    assert f"its learner host {run['host']} is gone" in ann.err.read_text()
    (stopped,) = cluster.status()["stopped"]
    assert (stopped["run"], stopped["host"]) == (run["run"], run["host"])
    assert cluster.status()["runs"] == []
    shown = here.start("status", "--http", cluster.page)
    assert shown.wait() == 0, shown.story()
    assert f"run {run['run']} (slow) of {run['host']} was stopped: its learner host" in shown.out.read_text()
    following = cluster.learn("next", "--rounds", "2")
    assert following.wait() == 0, following.story()
    assert_each_once(here, "next", 2)
    workers = [worker for peer in cluster.status()["peers"] for worker in peer["workers"]]
    assert [worker["in_flight"] for worker in workers] == [0] * len(workers)
