"""One run, several hosts: further ones play what they are dealt, come and go and die, and nothing of it shows in what is learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from system_scenarios import strict, three_turns
from system_world import Helping, Keeping, Ran, World, said, until, world

from scenarios import Evaluation, Scenario
from tinker.engines.engine import GenerateRequest
from tinker.protocol.batches import Row
from tinker.protocol.episodes import Recording
from tinker.protocol.to_host import Delivered, Opened
from tinker.protocol.values import Phase, PoolKind
from tinker.server.taskserver import Pool

pytestmark = pytest.mark.timeout(120)

EVALUATED = replace(three_turns, evaluations=(Evaluation("held-out", episodes=3, measure="x"),))
GIVEN: dict[str, Any] = {"rounds": 6, "groups": 6, "group_size": 2, "concurrency": 4, "evaluate_every": 3}


def by_seed(request: GenerateRequest) -> list[int]:
    """A digit that depends on the request's seed alone."""
    return said(str(request.sampling.seed % 10))


@asynccontextmanager
async def playing(place: Path, scheme: str, scenario: Scenario, *names: str, **given: Any) -> AsyncIterator[Playing]:
    """A run with further hosts, which are there before anything is answered."""
    async with world(place, scheme) as here:
        here.core.lease = 3.0
        engine = Keeping(by_seed, shuffled=True)
        engine.gate = anyio.Event()
        await here.serve(engine)
        made = Playing(here)

        async def learn() -> None:
            made.ran.append(await here.run(scenario, **{**GIVEN, **given}))

        here.tasks.start_soon(learn)
        run = await here.begun()
        for name in names:
            made.helping[name] = here.help(scenario, run, name=name)
        await until(lambda: all(name in made.hosts() for name in names))
        engine.gate.set()
        yield made
        await until(lambda: bool(made.ran), 60)


class Playing:
    """`ran`: what the run left, once it is over."""

    def __init__(self, here: World) -> None:
        self.here = here
        self.helping: dict[str, Helping] = {}
        self.ran: list[Ran] = []

    async def over(self) -> Ran:
        await until(lambda: bool(self.ran), 60)
        (ran,) = self.ran
        assert ran.exit.code == 0, ran.exit
        return ran

    def hosts(self) -> set[str]:
        return {name for run in self.here.core.runs.values() for name in run.dealing.hosts}

    def load(self, name: str) -> int:
        """Episodes that this host has in hand."""
        return sum(run.dealing.hosts[name].load for run in self.here.core.runs.values() if name in run.dealing.hosts)  # type: ignore[index]

    def delivered(self) -> Counter[str]:
        """Episodes that each further host has delivered, by its name."""
        found: Counter[str] = Counter()
        for each in {(m.host, e) for m in self.here.core.of(Delivered) for e in m.episodes}:
            found[each[0]] += 1
        return found


def told(recordings: list[Recording]) -> list[Recording]:
    """What must be the same whoever played: everything."""
    return [replace(each, run="") for each in recordings]


def assert_each_once(ran: Ran) -> None:
    """Every episode of every phase is recorded once."""
    found = Counter(recording.episode for recording in ran.recordings())
    assert set(found.values()) == {1}
    rollouts = [episode for episode in found if episode.phase == Phase.ROLLOUT]
    assert len(rollouts) == ran.config.rounds * ran.config.groups * ran.config.group_size


def numbers(ran: Ran) -> list[dict[str, Any]]:
    """The rows without what depends on the clock."""
    timed = ("seconds", "wait/", "tokens_per_second", "coordinator_cpu")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in ran.rows]


def of_each_agent(engine: Keeping) -> list[list[Row]]:
    """The batches of one agent after the other (those of one round come in any order)."""
    return [rows for _, rows in sorted(engine.batches, key=lambda each: each[0].rpartition("/")[2])]


@pytest.mark.parametrize("scheme", ["memory", "zmq"])
async def test_what_is_learned_does_not_depend_on_who_played(tmp_path: Path, scheme: str) -> None:
    async with playing(tmp_path / "one", scheme, EVALUATED) as alone:
        one = await alone.over()
    async with playing(tmp_path / "three", scheme, EVALUATED, "ann", "bob") as together:
        three = await together.over()
        for each in together.helping.values():
            await each.over.wait()
            assert each.exit is not None
            assert (each.exit.reason, each.exit.code) == ("finished", 0)
    assert together.delivered()["ann"] > 0
    assert together.delivered()["bob"] > 0
    assert told(three.recordings()) == told(one.recordings())
    assert numbers(three) == numbers(one)
    assert_each_once(three)
    batches = [of_each_agent(each.here.engines[0]) for each in (alone, together)]
    assert [len(rows) for rows in batches[0]] == [len(rows) for rows in batches[1]]
    for mine, theirs in zip(*batches, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a.ids.tolist(), a.mask.tolist()) == (b.ids.tolist(), b.mask.tolist())
            assert a.advantages.tolist() == b.advantages.tolist()


@pytest.mark.parametrize("scheme", ["memory", "zmq"])
async def test_what_a_dead_host_had_in_hand_is_played_by_others_and_counts_once(tmp_path: Path, scheme: str) -> None:
    async with playing(tmp_path, scheme, three_turns, "ann", "bob", evaluate_every=0, rounds=8) as run:
        await until(lambda: run.load("ann") > 0)
        await run.helping["ann"].kill()
        ran = await run.over()
    assert run.here.core.counts["episodes dealt again"] > 0
    assert_each_once(ran)
    assert all(row["episodes"] == 12 and row["failed"] == 0 for row in ran.trained())
    async with playing(tmp_path / "again", scheme, three_turns, evaluate_every=0, rounds=8) as alone:
        assert told((await alone.over()).recordings()) == told(ran.recordings())


async def test_a_host_that_is_told_to_leave_plays_what_it_has_and_is_dealt_no_more(tmp_path: Path) -> None:
    async with playing(tmp_path, "memory", three_turns, "ann", evaluate_every=0, rounds=8) as run:
        await until(lambda: run.load("ann") > 0)
        ann = run.helping["ann"]
        ann.further.leave()
        await ann.over.wait()
        assert ann.exit is not None
        assert (ann.exit.reason, ann.exit.code) == ("left", 0)
        assert "ann" not in run.here.core.roster.peers
        ran = await run.over()
    assert run.here.core.counts["episodes dealt again"] == 0
    assert_each_once(ran)


async def test_what_a_leaving_host_does_not_finish_in_time_is_handed_back(tmp_path: Path) -> None:
    async with playing(tmp_path, "memory", three_turns, evaluate_every=0, rounds=8) as run:
        ann = run.here.help(three_turns, await run.here.begun(), grace=0.0)
        await until(lambda: run.load("ann") > 0)
        ann.further.leave()
        await ann.over.wait()
        assert ann.exit is not None
        assert ann.exit.code == 0
        ran = await run.over()
    assert_each_once(ran)


async def test_hosts_come_and_go_between_and_within_rounds(tmp_path: Path) -> None:
    async with playing(tmp_path, "memory", strict, "ann", rounds=10, evaluate_every=0) as run:
        await until(lambda: run.delivered()["ann"] > 0)
        bob = run.here.help(strict, await run.here.begun(), name="bob")
        await until(lambda: run.delivered()["bob"] > 0)
        run.helping["ann"].further.leave()
        await run.helping["ann"].over.wait()
        again = run.here.help(strict, await run.here.begun(), name="ann")
        before = run.delivered()["ann"]
        await until(lambda: run.delivered()["ann"] > before)
        await bob.kill()
        ran = await run.over()
        await again.over.wait()
    assert_each_once(ran)


async def test_a_host_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    async with playing(tmp_path, "memory", three_turns, evaluate_every=0, rounds=4) as run:
        other = run.here.help(replace(three_turns, version=2), await run.here.begun())
        await other.over.wait()
        assert other.exit is not None
        assert (other.exit.reason, other.exit.code) == ("refused", 1)
        assert "version is 2, the run's is 1" in other.exit.detail
        nobody = run.here.help(three_turns, "no-such-run")
        await nobody.over.wait()
        assert nobody.exit is not None
        assert "there is no run 'no-such-run' here" in nobody.exit.detail
        await run.over()


async def test_several_task_servers_and_several_hosts_work_on_one_run(tmp_path: Path) -> None:
    async with playing(tmp_path, "zmq", three_turns, "ann", "bob", evaluate_every=0, rounds=6) as run:
        more = await run.here.serve(Keeping(by_seed, shuffled=True), name="more", pools=(Pool(PoolKind.ROLLOUT, 2, 8),))
        ran = await run.over()
    assert more.requests
    assert run.here.engines[0].requests
    assert_each_once(ran)
    assert all(not each.dropped for each in run.here.core.of(Opened))


async def test_what_was_delivered_is_removed_when_the_next_phase_begins(tmp_path: Path) -> None:
    async with playing(tmp_path, "memory", three_turns, "ann", evaluate_every=0, rounds=8) as run:
        await run.over()
        assert len({m.bundle.name for m in run.here.core.of(Delivered)}) > 1
        await until(lambda: not any((tmp_path / "spool-server").glob("*@*")))
