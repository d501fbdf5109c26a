"""Whole runs in one process: coordinator, task server and host over one network, with the scripted engine."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from system_scenarios import echo, moody, numpy_numbers, silent_bob, strict, three_players, three_turns
from system_world import EOS, TOKENIZER, Keeping, Notes, Ran, said, until, world

from scenarios import Scenario, load_scenario, replay
from scenarios.host import held_out
from tinker.engines.engine import GenerateRequest
from tinker.protocol.operations import ForwardBackward, Publish
from tinker.protocol.to_coordinator import EpisodeEnded, Heartbeat, OpenTurn, Operate
from tinker.protocol.to_host import MayUpdate, Opened, TurnClosed
from tinker.protocol.to_taskserver import Generate, Unload
from tinker.protocol.values import BASE, Edge, Ended, PeerName, Phase, PoolKind, unpack_ids
from tinker.server.taskserver import Pool

KEYS = {
    "round", "agent", "reward_mean", "reward_std", "phase", "version", "episodes", "tokens", "entropy", "kl", "grad_norm",
    "clip_fraction", "forfeits", "retries", "failed", "wait/rollout_start", "wait/update_start", "wait/update_end",
    "seconds/rollout", "seconds/update", "seconds/scenario", "tokens_per_second", "tokens_trained", "coordinator_cpu_per_turn",
}  # fmt: skip
EVALUATED = {"evaluation", "mode", "measure", "value", "n", "version", "reward_mean", "reward_std", "seconds/evaluate"}


def short(name: str, episodes: int = 2) -> Scenario:
    """A scenario of the library whose evaluations are short."""
    scenario = load_scenario(name)
    return replace(scenario, evaluations=tuple(replace(each, episodes=episodes) for each in scenario.evaluations))


def replies(scenario: Scenario) -> list[str]:
    given: list[str] = scenario.defaults["replies"]
    return given


@pytest.mark.parametrize("scheme", ["memory", "zmq"])
@pytest.mark.parametrize("name", ["guess", "nim", "dilemma"])
async def test_a_run_leaves_everything_it_promises(tmp_path: Path, scheme: str, name: str) -> None:
    scenario = short(name)
    async with world(tmp_path, scheme) as here:
        await here.serve(replies(scenario))
        ran = await here.run(scenario, rounds=3, groups=4, group_size=4, evaluate_every=2, pages=True)
    assert ran.exit.code == 0, ran.exit
    assert ran.notes == []
    assert json.loads((ran.path / "exit.json").read_text())["reason"] == "finished"
    assert {"summary.md", "curves.png", "config.toml"} <= {path.name for path in ran.path.iterdir()}

    agents = scenario.seats
    assert [(row["round"], row["agent"], row["version"]) for row in ran.trained()] == [
        (round, agent, round - 1) for round in (1, 2, 3) for agent in agents
    ]
    for row in ran.trained():
        assert row.keys() >= KEYS
        assert row["episodes"] == 16
    evaluated = [row for row in ran.rows if row["phase"] == "evaluate"]
    assert {row["round"] for row in evaluated} == {0, 2, 3}
    assert all(row.keys() >= EVALUATED and row["n"] == 2 for row in evaluated)

    for agent in agents:
        versions = sorted((ran.path / "adapters" / agent).iterdir())
        assert [path.name for path in versions] == ["final", "v000000", "v000001", "v000002", "v000003"]
        assert (versions[0] / "adapter_config.json").read_text() == (versions[-1] / "adapter_config.json").read_text()
        assert len({(path / "adapter_model.safetensors").read_bytes() for path in versions[1:]}) == 4

    recordings = ran.recordings()
    assert len(recordings) == 3 * 16 + 3 * len(held_out(scenario))
    for recording in recordings:
        assert (await replay(recording, scenario)).scores == recording.scores


async def test_every_token_is_of_its_rounds_version_and_old_versions_are_unloaded(tmp_path: Path) -> None:
    scenario = short("dilemma")
    async with world(tmp_path) as here:
        engine = await here.serve(replies(scenario))
        await here.run(scenario, rounds=4, groups=3, group_size=3)
    for closed in here.core.of(TurnClosed):
        assert {result.version.version for result in closed.results} == {closed.turn.episode.round - 1}
    opened = [each for each in here.core.of(Opened) if (each.phase, each.edge) == (Phase.ROLLOUT, Edge.START)]
    assert [{version.version for version in each.versions} for each in opened] == [{0}, {1}, {2}, {3}]
    assert Counter(each.version.version for each in here.core.of(Unload)) == {0: 2, 1: 2}
    assert {request.policy.version for request in engine.requests} == {0, 1, 2, 3}


async def test_a_run_that_is_over_leaves_nothing_on_the_task_server(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        engine = await here.serve("123")
        await here.run(three_turns, rounds=3)
        await until(lambda: list(engine._served) == [BASE] and not engine._scripts)
        assert list((tmp_path / "spool-server").iterdir()) == []


async def test_no_request_goes_without_its_agents_policy(tmp_path: Path) -> None:
    """Case D1."""
    async with world(tmp_path) as here:
        engine = await here.serve("123")
        await here.run(three_turns, rounds=1, groups=1, group_size=2)
    policies = Counter(str(request.policy).partition("/")[2] for request in engine.requests)
    assert policies == {"ann@0": 6, "bob@0": 6}


async def test_agents_train_on_their_own_accepted_tokens_and_nothing_else(tmp_path: Path) -> None:
    """Rows are rebuilt from what travelled: prompts, answers, and which of them parsed."""
    async with world(tmp_path) as here:
        engine = await here.serve(["1", "2", "3", "no digit"])
        ran = await here.run(strict, rounds=1, groups=3, group_size=4)
    expected: dict[str, list[tuple[list[int], list[int]]]] = {"ann": [], "bob": []}
    kinds = {(r.episode, line.seat, line.turn): line.kind for r in ran.recordings() for line in r.lines if line.ids}
    asked: dict[tuple[Any, str], list[tuple[list[int], list[int], bool]]] = {}
    prompts = {(turn.turn, each.seat): each for turn in here.core.of(OpenTurn) for each in turn.requests}
    for closed in here.core.of(TurnClosed):
        for result in closed.results:
            accepted = kinds[closed.turn.episode, result.seat, closed.turn.number] == "reply"
            prompt = unpack_ids(prompts[closed.turn, result.seat].prompt)
            asked.setdefault((closed.turn.episode, result.seat), []).append((prompt, unpack_ids(result.ids), accepted))
    for (_, seat), parts in asked.items():
        row = parts[-1][0] + parts[-1][1]
        mask = [0] * len(row)
        for prompt, answer, accepted in parts:
            assert row[: len(prompt) + len(answer)] == prompt + answer  # nothing sampled is ever encoded again
            mask[len(prompt) : len(prompt) + len(answer)] = [int(accepted)] * len(answer)
        expected[seat].append((row, mask))
    assert any(not accepted for parts in asked.values() for _, _, accepted in parts)
    assert sorted(policy.rpartition("/")[2] for policy, _ in engine.batches) == ["ann", "bob"]
    for policy, rows in engine.batches:
        for row in rows:
            assert (row.ids.tolist(), row.mask.astype(int).tolist()) in expected[policy.rpartition("/")[2]]
    for row in ran.trained():
        assert row["rows_trained"] + sum(row.get(f"count/{fate}", 0) for fate in ("rejected", "equal")) == 12


async def test_frozen_agents_never_update_and_a_cadence_is_kept(tmp_path: Path) -> None:
    scenario = short("dilemma")
    agents = {"alpha": {"learning": {"every": 0}}, "beta": {"learning": {"every": 2}}}
    async with world(tmp_path) as here:
        engine = await here.serve(replies(scenario))
        ran = await here.run(scenario, rounds=4, groups=3, group_size=3, agents=agents)
    assert [row["version"] for row in ran.trained("alpha")] == [0, 0, 0, 0]
    assert [row["version"] for row in ran.trained("beta")] == [0, 0, 1, 1]
    assert [policy.rpartition("/")[2] for policy, _ in engine.batches] == ["beta", "beta"]
    assert sorted(path.name for path in (ran.path / "adapters/alpha").iterdir()) == ["final", "v000000"]
    assert (ran.path / "adapters/beta/final").resolve().name == "v000002"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("in_turn", ["may ann", "ann publishes 1", "may bob", "bob publishes 1", "may cy", "cy publishes 1"]),
        ([["cy"], ["ann"]], ["may cy", "cy publishes 1", "may ann", "ann publishes 1", "may bob", "bob publishes 1"]),
        ([["bob", "ann"]], ["may bob", "may ann", "ann publishes 1", "bob publishes 1", "may cy", "cy publishes 1"]),
        ("together", ["may ann", "may bob", "may cy", "ann publishes 1", "bob publishes 1", "cy publishes 1"]),
    ],
)
async def test_updates_keep_their_order(tmp_path: Path, order: Any, expected: list[str]) -> None:
    async with world(tmp_path) as here:
        await here.serve("123")
        await here.run(three_players, rounds=1, groups=2, group_size=4, update_order=order)
    seen = []
    for each in here.core.of(MayUpdate, Operate):
        if isinstance(each, MayUpdate):
            seen.append(f"may {each.agent}")
        elif isinstance(each.operation, Publish):
            seen.append(f"{each.agent} publishes {each.operation.version}")
    published = [text for text in seen if "publishes" in text]
    if order in ("together", [["bob", "ann"]]):  # of those that update at once, any may be first
        assert sorted(seen) == sorted(expected)
        assert seen[:2] == expected[:2]
    else:
        assert seen == expected
    assert len(published) == 3


async def test_an_agent_without_a_batch_keeps_its_version_and_the_others_go_on(tmp_path: Path) -> None:
    """Case A2."""
    async with world(tmp_path) as here:
        await here.serve("123")
        ran = await here.run(silent_bob, rounds=2, groups=2, group_size=4)
    assert ran.exit.code == 0
    assert {agent: [row["version"] for row in ran.trained(agent)] for agent in ("ann", "bob", "cy")} == {
        "ann": [0, 1],
        "bob": [0, 0],
        "cy": [0, 1],
    }
    assert [note for note in ran.notes if note.startswith("round 1, bob: nothing to train on")]
    assert sorted(path.name for path in (ran.path / "adapters/bob").iterdir()) == ["final", "v000000"]


@pytest.mark.parametrize("scheme", ["memory", "zmq"])
async def test_bulk_goes_by_connection_between_machines(tmp_path: Path, scheme: str) -> None:
    async with world(tmp_path, scheme) as here:
        await here.serve("123")
        by_file = await here.run(three_turns, name="near", rounds=2)
        far = await here.run(three_turns, name="far", machine="elsewhere", rounds=2)
    assert (by_file.exit.code, far.exit.code) == (0, 0), far.exit
    spool = here.place / "spool-server"
    batches = {
        each.run: each.operation.batch for each in here.core.of(Operate) if isinstance(each.operation, ForwardBackward)
    }
    near_ref, far_ref = batches.values()
    assert Path(far_ref.path).parent == spool != Path(near_ref.path).parent
    same = [(ran.path / "adapters/ann/final/adapter_model.safetensors").read_bytes() for ran in (by_file, far)]
    assert same[0] == same[1]


async def test_two_runs_share_a_task_server(tmp_path: Path) -> None:
    ran: dict[str, Ran] = {}
    async with world(tmp_path) as here:
        engine = await here.serve("123")

        async def one(name: str) -> None:
            ran[name] = await here.run(three_turns, name=name, rounds=3)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "first")
            tasks.start_soon(one, "second")
    assert [each.exit.code for each in ran.values()] == [0, 0]
    assert [row["version"] for each in ran.values() for row in each.trained("ann")] == [0, 1, 2] * 2
    assert len({request.policy.policy for request in engine.requests}) == 4
    first, second = ([r.lines for r in ran[name].recordings()] for name in ("first", "second"))
    assert first == second  # neither can tell that the other was there


async def test_a_run_waits_for_a_task_server(tmp_path: Path) -> None:
    ran: list[Ran] = []
    async with world(tmp_path) as here, anyio.create_task_group() as tasks:

        async def play() -> None:
            ran.append(await here.run(three_turns))

        tasks.start_soon(play)
        await until(lambda: bool(here.core.queue))
        await here.serve("123")
    assert ran[0].exit.code == 0
    assert ran[0].notes == ["waiting in the queue: no task server has joined; start one with `opentinker taskserver`"]


async def test_a_run_outlives_a_task_server_that_only_rolls_out(tmp_path: Path) -> None:
    watcher = Notes()
    async with world(tmp_path) as here:
        await here.serve("123")
        rollout = (Pool(PoolKind.ROLLOUT, 1, 4),)
        await here.serve("123", name="spare", pools=rollout)
        watcher.on_playing = lambda done, total: here.stop(1) if done == 3 else None
        ran = await here.run(three_turns, rounds=3, groups=2, group_size=4, watcher=watcher)
    assert ran.exit.code == 0, ran.exit
    assert [row["failed"] for row in ran.trained("ann")] == [0, 0, 0]
    assert {each.worker for each in here.core.of(Generate)} == {"server/rollout-0", "spare/rollout-0"}


async def test_a_task_server_joins_a_new_coordinator_again(tmp_path: Path) -> None:
    """Its heartbeat is refused there, so that it knows."""
    async with world(tmp_path) as here:
        await here.serve("123")
        here.core.lose(PeerName("server"), "not heard for a while", 0.0)
        here.servers[0]._send(Heartbeat())
        await until(lambda: "server" in here.core.roster.peers)
        ran = await here.run(three_turns)
    assert ran.exit.code == 0


async def test_a_run_ends_when_its_only_task_server_is_gone(tmp_path: Path) -> None:
    watcher = Notes()
    async with world(tmp_path, lease=2.0) as here:
        await here.serve("123")
        watcher.on_playing = lambda done, total: here.stop(0) if done == 3 else None
        ran = await here.run(three_turns, rounds=3, groups=2, group_size=4, watcher=watcher, worker_deadline=0.0)
    assert (ran.exit.reason, ran.exit.code) == ("stopped", 3)
    assert "task server server is gone" in ran.exit.detail


@pytest.mark.parametrize("phase", ["rollout", "update"])
async def test_a_run_ends_when_the_coordinator_ends_it_in_any_phase(tmp_path: Path, phase: str) -> None:
    async with world(tmp_path, lease=2.0) as here:
        engine = Keeping("123")
        engine.refuse = lambda policy, batch: here.stop(0) or False  # type: ignore[func-returns-value]
        watcher = Notes()
        watcher.on_playing = lambda done, total: here.stop(0) if done and phase == "rollout" else None
        await here.serve(engine)
        ran = await here.run(three_turns, watcher=watcher, worker_deadline=0.0)
    assert (ran.exit.reason, ran.exit.code) == ("stopped", 3)


async def test_an_interrupt_keeps_the_finished_rounds(tmp_path: Path) -> None:
    signals = iter([signal.SIGINT])

    def interrupt(request: GenerateRequest) -> list[int]:
        if request.policy.version == 2:
            for number in signals:  # once: a second one ends the process
                signal.raise_signal(number)
        return said("2" if request.sampling.seed % 2 else "3")

    async with world(tmp_path) as here:
        await here.serve(Keeping(interrupt))
        ran = await here.run(three_turns, rounds=50, groups=2, group_size=4)
        assert here.core.runs == {}
    assert (ran.exit.reason, ran.exit.code) == ("interrupted", 0), ran.exit
    assert [row["round"] for row in ran.trained("ann")] == [1, 2]
    assert (ran.path / "adapters/ann/final").resolve().name == "v000002"
    assert (ran.path / "summary.md").exists()
    recordings = ran.recordings()
    assert {(each.episode.round, each.ended) for each in recordings} == {
        (1, Ended.FINISHED),
        (2, Ended.FINISHED),
        (3, Ended.DROPPED),
    }
    for recording in recordings:
        await replay(recording, three_turns)


@pytest.mark.parametrize("mood", ["raise", "seats", "array", "wait"])
async def test_an_episode_that_goes_wrong_is_counted_and_the_others_go_on(tmp_path: Path, mood: str) -> None:
    """Case B4, and wrong scores, and scenarios that never end."""
    async with world(tmp_path) as here:
        await here.serve("123")
        given = {"max_failed_episodes": 1.0, "episode_deadline": 0.3 if mood == "wait" else 60.0}
        ran = await here.run(moody, groups=8, group_size=2, rounds=2, params={"mood": mood}, **given)
    assert ran.exit.code == 0, ran.exit
    ended = Counter(each.ended for each in ran.recordings())
    assert 0 < ended[Ended.FAILED] < 32
    assert sum(row["failed"] for row in ran.trained()) == ended[Ended.FAILED]
    assert [row["version"] for row in ran.trained()] == [0, 1]
    reasons = {each.reason for each in ran.recordings() if each.ended is Ended.FAILED}
    expected = {
        "raise": "KeyError: 'the tool has no such page'",
        "seats": "a score for 'bob'",
        "array": "the score of seat 'ann' is array([1, 2])",
        "wait": "timeout: not over after its 0.3 s, at",
    }
    assert all(expected[mood] in reason for reason in reasons), reasons
    assert [note for note in ran.notes if f"{ran.trained()[0]['failed']} of 16 episodes failed" in note]


async def test_an_episode_without_end_ends_with_its_players_context(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.serve("123")
        ran = await here.run(moody, rounds=1, groups=2, group_size=1, params={"mood": "endless", "share": 1.0})
    assert ran.exit.code == 0, ran.exit
    assert {(each.ended, each.reason) for each in ran.recordings()} == {
        (Ended.FORFEITED, "ann: truncated (context) (after 1 try)")
    }
    assert ran.trained()[0]["cut"] == 2


async def test_too_many_failed_episodes_end_the_run_with_the_first_traceback(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.serve("123")
        ran = await here.run(moody, groups=8, group_size=2, params={"share": 1.0})
    assert (ran.exit.reason, ran.exit.code) == ("too many failed episodes", 1)
    told = json.loads((ran.path / "exit.json").read_text())["detail"]
    assert "16 of 16 episodes failed, allowed are 10% (max_failed_episodes)" in told
    assert 'raise KeyError("the tool has no such page")' in told
    assert here.core.runs == {}


@pytest.mark.parametrize("mood", ["nan", "none"])
async def test_a_missing_score_is_left_out_and_counted(tmp_path: Path, mood: str) -> None:
    """Case H5 through the whole system."""
    async with world(tmp_path) as here:
        await here.serve("123")
        ran = await here.run(moody, groups=8, group_size=2, params={"mood": mood})
    assert ran.exit.code == 0
    for row in ran.trained():
        assert 0 < row["count/bad_scores"] == row["count/bad_score"] < 16
        assert row["failed"] == 0
        assert 1 <= row["reward_mean"] <= 3
    assert [row["version"] for row in ran.trained()] == [0, 1]


@pytest.mark.parametrize("kind", ["end", "nothing", "long", "never ending"])
async def test_odd_replies_forfeit_and_nothing_breaks(tmp_path: Path, kind: str) -> None:
    texts: dict[str, list[int]] = {
        "end": [EOS],
        "nothing": [],
        "long": said("x" * 100_000),
        "never ending": said("x" * 100)[:-1],
    }
    engine = Keeping(lambda request: texts[kind] if request.sampling.seed % 2 else said("2"))
    async with world(tmp_path) as here:
        await here.serve(engine)
        learning = {"max_tokens": 1_000_000 if kind == "long" else 6}
        ran = await here.run(strict, rounds=2, groups=2, group_size=4, learning=learning)
    assert ran.exit.code == 0, ran.exit
    assert all(row["forfeits"] for row in ran.trained())
    assert all(row["cut"] for row in ran.trained()) == (kind in ("long", "never ending"))
    for recording in ran.recordings():
        await replay(recording, strict)


@pytest.mark.parametrize("machine", ["", "elsewhere"])
async def test_a_refused_gradient_leaves_that_agent_where_it_was(tmp_path: Path, machine: str) -> None:
    """Case H5: a non-finite gradient skips that agent's step and says so."""
    async with world(tmp_path) as here:
        engine = Keeping("123")
        engine.refuse = lambda policy, batch: policy.endswith("/bob") and batch <= 2
        await here.serve(engine)
        ran = await here.run(three_turns, rounds=3, groups=2, group_size=4, machine=machine)
    assert ran.exit.code == 0, ran.exit
    assert [row["version"] for row in ran.trained("ann")] == [0, 1, 2]
    assert [row["version"] for row in ran.trained("bob")] == [0, 0, 1]
    assert ran.trained("bob")[0]["count/refused_updates"] == 1
    (note,) = ran.notes
    assert "bob was not updated in round 1 and keeps version 0" in note
    assert "is not finite" in note


async def test_an_update_that_is_refused_half_way_publishes_what_was_learned(tmp_path: Path) -> None:
    """The weights have moved, so the next round must not be played by the old ones."""
    async with world(tmp_path) as here:
        engine = Keeping("123")
        engine.refuse = lambda policy, batch: batch == 2
        await here.serve(engine)
        ran = await here.run(echo, rounds=2, groups=4, group_size=4, learning={"epochs": 2})
    assert ran.exit.code == 0
    assert [row["version"] for row in ran.trained()] == [0, 1]
    assert [row.get("count/refused_updates", 0) for row in ran.trained()] == [1, 0]
    assert "ann ended its update of version 0 after 1 of 2 steps" in ran.notes[0]


async def test_a_run_gets_the_model_it_names(tmp_path: Path) -> None:
    ran: list[Ran] = []
    async with world(tmp_path) as here:
        await here.serve("123")
        assert (await here.run(echo, model="demo")).exit.code == 0
        async with anyio.create_task_group() as tasks:

            async def other() -> None:
                ran.append(await here.run(echo, name="other", model="another"))

            tasks.start_soon(other)
            await until(lambda: bool(here.core.queue))
            signal.raise_signal(signal.SIGINT)
    assert (ran[0].exit.reason, ran[0].exit.code) == ("interrupted", 130)
    assert ran[0].notes == [
        "waiting in the queue: no task server with a rollout and an update pool holds model another (there: demo)"
    ]


async def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.app.local.JOIN", 0.1)
    async with world(tmp_path) as here:
        here.address = "nobody"
        ran = await here.run(echo)
    assert (ran.exit.reason, ran.exit.code) == ("coordinator lost", 3)
    assert "no coordinator answers at nobody; start one with `opentinker coordinator`" in ran.exit.detail


async def test_numbers_of_numpy_go_through(tmp_path: Path) -> None:
    """Case K8."""
    async with world(tmp_path) as here:
        await here.serve("123")
        ran = await here.run(numpy_numbers, rounds=1)
    (ann, bob) = ran.trained()
    assert (bob["reward_mean"], ann["measure/flag"], ann["measure/half"]) == (3.0, 1.0, 0.5)
    assert {score for each in ran.recordings() for seat, score in each.scores if seat == "ann"} <= {0.5, 1.0, 1.5}


async def seeds(place: Path, **given: Any) -> list[int]:
    async with world(place) as here:
        workers = given.pop("workers", 1)
        await here.serve("123", pools=(Pool(PoolKind.ROLLOUT, workers, 4), Pool(PoolKind.UPDATE)))
        await here.run(three_turns, rounds=1, groups=1, group_size=4, **given)
        return sorted(request.sampling.seed for request in here.engines[0].requests)


async def test_every_request_has_a_seed_of_its_own_whatever_the_concurrency(tmp_path: Path) -> None:
    """Case P1."""
    first = await seeds(tmp_path / "a", seed=7)
    assert len(set(first)) == 24
    assert await seeds(tmp_path / "b", seed=7, concurrency=1) == first
    assert await seeds(tmp_path / "c", seed=7, workers=3) == first
    assert not set(await seeds(tmp_path / "d", seed=8)) & set(first)


async def test_scores_belong_to_their_episodes_whatever_comes_first(tmp_path: Path) -> None:
    """Case P2."""

    def repeat(request: GenerateRequest) -> list[int]:
        return said(TOKENIZER.decode(list(request.prompt)).rpartition("say ")[2][0])

    order: list[Any] = []
    async with world(tmp_path) as here:
        await here.serve(Keeping(repeat, shuffled=True))
        ran = await here.run(echo, rounds=1, groups=16, group_size=1)
        order = [each.episode.index for each in here.core.of(EpisodeEnded)]
    assert order != sorted(order)
    assert ran.trained()[0]["measure/right"] == 1.0
    for recording in ran.recordings():
        secret = next(line.text for line in recording.lines if line.kind == "ask")
        assert dict(recording.scores) == {"ann": int(secret.removeprefix("say "))}
