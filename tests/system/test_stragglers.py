"""Whole runs in one process whose agents or episodes are late, at barriers with a deadline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from system_scenarios import DEFAULTS, number, three_players
from system_world import Keeping, until, world

from coordinator.app.cast import check
from coordinator.app.config import ConfigError, resolve
from scenarios import Scores, Table, scenario
from tinker.protocol.batches import Row
from tinker.protocol.operations import Publish, Rewind
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import EpisodeEnded, Operate
from tinker.protocol.to_host import Opened
from tinker.protocol.values import Edge, LossSpec, Phase, PolicyName


@scenario("ann", version=1, defaults=DEFAULTS)
async def sometimes_for_ever(table: Table) -> Scores:
    """About one start in three never ends."""
    value = await table["ann"].act("A digit:", number)
    if table.rng.random() < 0.3:
        await anyio.sleep_forever()
    return {"ann": value}


class Slow(Keeping):
    """A gradient of bob's in his first update takes as long as the test likes; `late` hears when it has begun."""

    def __init__(self, replies: Sequence[str]) -> None:
        super().__init__(replies)
        self.late, self.go_on = anyio.Event(), anyio.Event()
        self.rewound: list[PolicyName] = []

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        measured = await super().forward_backward(policy, rows, loss)
        if policy.endswith("bob") and not self.late.is_set():
            self.late.set()
            await self.go_on.wait()
        return measured

    async def rewind(self, policy: PolicyName, adapter: object) -> None:
        self.rewound.append(policy)
        await super().rewind(policy, adapter)  # type: ignore[arg-type]


async def test_episodes_that_are_late_are_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    rules = {"rollout_end": {"deadline": 1.0, "straggler": "drop"}}
    async with world(tmp_path) as here:
        engine = await here.serve(["1", "2", "3", "4"])
        ran = await here.run(sometimes_for_ever, rounds=2, groups=8, group_size=2, barriers=rules)
    assert ran.exit.code == 0, ran.exit
    ends = [each for each in here.core.of(Opened) if (each.phase, each.edge) == (Phase.ROLLOUT, Edge.END)]
    dropped = {episode for each in ends for episode in each.dropped}
    assert dropped
    played = {str(recording.episode) for recording in ran.recordings()}
    assert played | dropped == {f"{round}/rollout/{k}" for round in (1, 2) for k in range(16)}
    assert not played & dropped
    assert not dropped & {str(each.episode) for each in here.core.of(EpisodeEnded)}
    for row, end in zip(ran.trained(), ends, strict=True):
        assert row["episodes"] == 16 - len(end.dropped) == row["rows"]
        assert row.get("count/dropped_episodes", 0) == len(end.dropped)
    assert any("not there in time and dropped: " in note for note in ran.notes)
    assert here.core.counts["dropped episodes"] == len(dropped) and engine.batches


async def test_an_agent_that_is_late_keeps_its_version_and_rejoins_from_it(tmp_path: Path) -> None:
    rules = {"update_end": {"deadline": 1.0, "straggler": "drop"}}
    async with world(tmp_path) as here:
        engine = Slow(["1", "2", "3", "4"])
        await here.serve(engine)
        async with anyio.create_task_group() as tasks:

            async def free() -> None:
                """Only after the round was over is the gradient ready."""
                await engine.late.wait()
                await until(lambda: any(each.dropped for each in here.core.of(Opened)))
                engine.go_on.set()

            tasks.start_soon(free)
            ran = await here.run(
                three_players, rounds=3, groups=2, group_size=4, barriers=rules, update_order="in_turn"
            )
    assert ran.exit.code == 0, (ran.exit, ran.notes)
    (end,) = [each for each in here.core.of(Opened) if each.dropped]
    assert (end.round, end.members, end.dropped) == (1, ("ann",), ("bob", "cy"))
    assert [row["version"] for row in ran.trained("ann")] == [0, 1, 2]
    for late in ("bob", "cy"):
        assert [row["version"] for row in ran.trained(late)] == [0, 0, 1]
        assert [row.get("count/left_out", 0) for row in ran.trained(late)] == [1, 0, 0]
    assert [policy.rpartition("/")[2] for policy in engine.rewound] == ["bob", "cy"]
    asked = [
        each for each in here.core.of(Operate) if each.agent == "bob" and isinstance(each.operation, Publish | Rewind)
    ]
    assert [type(each.operation).__name__ for each in asked] == ["Rewind", "Publish", "Publish"]
    assert here.core.of(Refused) == []


async def test_a_run_that_must_not_wait_stops_and_says_for_whom(tmp_path: Path) -> None:
    rules = {"deadline": 1.0, "straggler": "fail"}
    async with world(tmp_path) as here:
        await here.serve(["1", "2"])
        ran = await here.run(sometimes_for_ever, rounds=2, groups=8, group_size=1, barriers=rules)
    assert ran.exit.code != 0
    assert "the end of rollout in round 1 did not open in" in ran.exit.detail
    assert "1/rollout/" in ran.exit.detail
    assert "the end of rollout" in json.loads((ran.path / "exit.json").read_text())["detail"]


def test_a_quorum_that_cannot_be_reached_is_refused_with_the_configuration() -> None:
    given = {"barriers": {"deadline": 1.0, "straggler": "drop", "quorum": 4, "evaluate_end": {"deadline": 0}}}
    config = resolve(three_players.defaults, given, {"scenario": three_players.name, "groups": 1, "group_size": 4})
    with pytest.raises(ConfigError) as refused:
        check(three_players, config, local=True)
    assert str(refused.value).count("the quorum is 4, but the run has 3 agents; lower it") == 4
    assert "rollout_end" not in str(refused.value)


def test_a_wrong_rule_is_named_with_its_place() -> None:
    given = {"barriers": {"straggler": "hope", "update_end": {"deadline": -1, "grace": 2}}}
    with pytest.raises(ConfigError) as refused:
        resolve(given, {"scenario": "nim"})
    for place in ("barriers.straggler", "barriers.update_end.deadline", "barriers.update_end.grace: unknown key"):
        assert place in str(refused.value)
