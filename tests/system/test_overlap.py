"""Whole runs whose agents may lag: a slow update overlaps the next rollouts, within the bound, and the report says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from system_restart import restarting
from system_scenarios import silent_bob, three_players, three_turns
from system_world import Keeping, Ran, until, world

from coordinator.app.cast import check
from coordinator.app.config import ConfigError, resolve
from coordinator.app.history import check as check_journal
from tinker.protocol.batches import Row
from tinker.protocol.operations import Publish
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import Operate
from tinker.protocol.to_host import Opened, TurnClosed, UpdateEnded
from tinker.protocol.to_taskserver import Load, Unload
from tinker.protocol.values import Edge, LossSpec, Phase, PolicyName


class Waiting(Keeping):
    """A gradient of bob's number `k` (from 1) waits until `until_then(k)` is so."""

    def __init__(self, replies: Sequence[str], until_then: Callable[[int], bool]) -> None:
        super().__init__(replies)
        self.until_then = until_then
        self.losses: list[LossSpec] = []

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        measured = await super().forward_backward(policy, rows, loss)
        self.losses.append(loss)
        if policy.endswith("bob"):
            number = sum(who == policy for who, _ in self.batches)
            await until(lambda: self.until_then(number))
        return measured


def opened(messages: Sequence[Any], round: int, edge: Edge) -> bool:
    openings = [each for each in messages if isinstance(each, Opened)]
    return any((each.round, each.phase, each.edge) == (round, Phase.ROLLOUT, edge) for each in openings)


async def test_rollouts_go_on_beside_a_slow_update_and_no_further_than_the_bound(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        rounds = 5
        engine = Waiting(
            [
                "1",
                "2",
                "3",
            ],  # bob's update of round k goes on when rollout k + 2 is over, the last that may begin without it
            lambda number: opened(here.core.of(Opened), min(number + 2, rounds), Edge.END),
        )
        await here.serve(engine)
        ran = await here.run(three_players, rounds=rounds, groups=2, group_size=4, learning={"max_lag": 2})
    assert ran.exit.code == 0, ran.exit
    assert here.core.of(Refused) == []
    log = here.core.of(Opened, UpdateEnded)
    for round in (1, 2):
        ended = log.index(UpdateEnded(log[0].run, round, "bob"))
        assert opened(log[:ended], round + 2, Edge.END)
        assert not opened(log[:ended], round + 3, Edge.START)
    versions = {
        (closed.turn.episode.round, result.version.policy.rpartition("/")[2]): result.version.version
        for closed in here.core.of(TurnClosed)
        for result in closed.results
    }
    assert [versions[round, "bob"] for round in range(1, rounds + 1)] == [0, 0, 0, 1, 2]
    for round in range(1, rounds + 1):
        assert round - 3 <= versions[round, "ann"] <= round - 1
    assert [(row["lag_mean"], row["lag_max"]) for row in ran.trained("bob")] == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]
    assert all(row["count/stale_tokens"] == 0 for row in ran.trained())
    assert [row["round"] for row in ran.trained("ann")] == list(range(1, rounds + 1))
    assert sum(row["overlap_seconds"] for row in ran.trained("bob")) > 0
    assert {(loss.name, loss.cap) for loss in engine.losses} == {("ppo", 3.0)}
    assert "## Rollouts beside updates" in (ran.path / "summary.md").read_text()


async def test_a_slow_agent_holds_up_nobody_elses_update(tmp_path: Path) -> None:
    async with world(tmp_path) as here:

        def others_are_through(number: int) -> bool:
            published = [
                each.agent
                for each in here.core.of(Operate)
                if isinstance(each.operation, Publish) and each.operation.version >= 3
            ]
            return number > 1 or {"ann", "cy"} <= set(published)

        engine = Waiting(["1", "2", "3"], others_are_through)
        await here.serve(engine)
        ran = await here.run(three_players, rounds=3, groups=2, group_size=4, learning={"max_lag": 2})
    assert ran.exit.code == 0, ran.exit
    ended = [(each.agent, each.round) for each in here.core.of(UpdateEnded)]
    assert ended.index(("ann", 3)) < ended.index(("bob", 1))


async def test_agents_of_one_run_may_differ_and_one_that_is_in_step_is_waited_for(tmp_path: Path) -> None:
    agents = {"bob": {"learning": {"max_lag": 0}}}
    async with world(tmp_path) as here:
        engine = await here.serve(["1", "2", "3"])
        ran = await here.run(
            three_players,
            rounds=4,
            groups=2,
            group_size=4,
            learning={"max_lag": 1},
            agents=agents,
            update_order="in_turn",
        )
    assert ran.exit.code == 0, ran.exit
    assert [row["version"] for row in ran.trained("bob")] == [0, 1, 2, 3]
    assert "lag_max" not in ran.trained("bob")[0]
    assert len(engine.batches) == 12
    ended = [(each.round, each.agent) for each in here.core.of(UpdateEnded)]
    for round in range(1, 5):
        assert [agent for at, agent in ended if at == round] == ["ann", "bob", "cy"]


async def test_old_versions_are_unloaded_when_no_round_may_ask_for_them(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.serve(["1", "2", "3"])
        await here.run(three_turns, rounds=6, groups=2, group_size=3, learning={"max_lag": 1})
    loaded: set[tuple[str, Any]] = set()
    most = 0
    for each in here.core.of(Load, Unload):
        key = (each.worker, each.version)
        loaded = loaded | {key} if isinstance(each, Load) else loaded - {key}
        policies = [version.policy for _, version in loaded]
        most = max(most, *(policies.count(policy) for policy in policies), 0)
    assert 2 <= most <= 3
    assert len([each for each in here.core.of(Unload) if each.version.policy.endswith("ann")]) >= 4


async def test_who_is_late_for_a_rollout_sits_the_round_out_and_comes_back(tmp_path: Path) -> None:
    rules = {"rollout_start": {"deadline": 0.5, "straggler": "drop"}}
    async with world(tmp_path) as here:
        engine = Waiting(
            ["1", "2", "3"],
            lambda number: number > 1 or any(each.dropped for each in here.core.of(Opened)),
        )
        await here.serve(engine)
        given = {"learning": {"max_lag": 1}, "barriers": rules}
        ran = await here.run(three_players, rounds=4, groups=2, group_size=4, **given)
    assert ran.exit.code == 0, (ran.exit, ran.notes)
    assert here.core.of(Refused) == []
    first = next(each for each in here.core.of(Opened) if each.dropped)
    assert (first.round, first.dropped) == (3, ("bob",))
    assert [row.get("count/left_out", 0) for row in ran.trained("bob")][2] == 1.0
    assert [row.get("count/left_out", 0) for row in ran.trained("ann")] == [0, 0, 0, 0]
    assert len(ran.trained()) == 12


async def test_evaluations_wait_for_every_update(tmp_path: Path) -> None:
    from scenarios import load_scenario

    scenario = load_scenario("dilemma")
    async with world(tmp_path) as here:
        await here.serve(scenario.defaults["replies"])
        ran = await here.run(
            scenario, rounds=4, groups=2, group_size=3, evaluate_every=2, learning={"max_lag": 2, "algorithm": "grpo"}
        )
    assert ran.exit.code == 0, ran.exit
    evaluated = [(row["round"], row["version"]) for row in ran.rows if row["phase"] == "evaluate"]
    updated = {row["agent"]: 0 for row in ran.trained()}
    assert {round for round, _ in evaluated} == {0, 2, 4}
    assert max(version for round, version in evaluated if round == 4) == max(
        int(path.name[1:]) for path in (ran.path / "adapters").glob("*/v*")
    )
    assert len(updated) == 2


async def test_a_stop_ends_the_run_after_the_updates_in_hand(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        engine = await here.serve(["1", "2", "3"])
        async with anyio.create_task_group() as tasks:

            async def drain() -> None:
                await until(lambda: len(engine.batches) >= 5)
                here.daemon.stop()

            tasks.start_soon(drain)
            ran = await here.run(three_players, rounds=500, groups=1, group_size=3, learning={"max_lag": 2})
    assert (ran.exit.reason, ran.exit.code) == ("interrupted", 0)
    assert ran.rows


MEASURED = ("round", "agent", "episodes", "failed")


async def _killed(place: Path, *deaths: tuple[int, str]) -> tuple[Ran, int]:
    await anyio.Path(place).mkdir()
    async with restarting(place, *deaths) as here:
        await here.world.serve("123")
        ran = await here.world.run(silent_bob, rounds=3, groups=1, group_size=3, learning={"max_lag": 1})
        lives = len(here.lives)
    check_journal(here.journal)
    return ran, lives


@pytest.mark.parametrize("when", ["input", "write"])
@pytest.mark.parametrize("first", range(20, 80, 12))
async def test_a_coordinator_that_dies_in_an_overlapped_round_goes_on_in_it(
    tmp_path: Path, first: int, when: str
) -> None:
    """The journal leads to the same states and effects, and everything that was to be updated was, once."""
    found: dict[int, tuple[Ran, int]] = {}

    async def one(at: int) -> None:
        found[at] = await _killed(tmp_path / f"killed-{at}", (at, when))

    async with anyio.create_task_group() as tasks:
        for at in range(first, first + 12, 2):
            tasks.start_soon(one, at)
    for at, (ran, lives) in found.items():
        assert ran.exit.code == 0, (at, ran.exit, ran.notes)
        assert lives == 2 or at > 60
        assert [(row["round"], row["agent"]) for row in ran.trained()] == [
            (round, agent) for round in (1, 2, 3) for agent in ("ann", "bob", "cy")
        ]
        assert sorted(path.name for path in (ran.path / "adapters/bob").iterdir()) == ["final", "v000000"]
        assert (ran.path / "adapters/ann/final").resolve().name == (
            f"v{sum(row.get('stepped', 0) == 1 for row in ran.trained('ann')):06d}"
        )
        assert json.loads((ran.path / "exit.json").read_text())["reason"] == "finished"


def test_deadlines_where_nobody_waits_and_other_nonsense_are_refused_with_the_configuration() -> None:
    given = {
        "learning": {"max_lag": 1},
        "deterministic": True,
        "barriers": {"deadline": 1.0, "update_end": {"deadline": 2.0}},
    }
    config = resolve(three_players.defaults, given, {"scenario": three_players.name})
    with pytest.raises(ConfigError) as refused:
        check(three_players, config, local=True)
    assert str(refused.value).count("nobody waits where updates begin and end") == 1
    assert "barriers.update_end" in str(refused.value)
    assert "deterministic: with max_lag the version" in str(refused.value)
    for wrong, why in (({"max_lag": -1}, "learning.max_lag"), ({"ratio_cap": 0.5}, "must be above 1")):
        with pytest.raises(ConfigError, match=why):
            resolve({"scenario": "nim", "learning": wrong})
