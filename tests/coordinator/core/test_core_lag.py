"""Agents that may lag: their updates overlap the next rollouts, each at its own pace, within the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_values import END, EVALUATE, ROLLOUT, RUN, START, UPDATE, agent, arrival, arrivals, canonical, run_spec, turn
from test_core_coordinator import HOST, R0, R1, SERVER, Desk, admitted, asked, done, kinds, loaded, of, seat

from coordinator.core.coordinator import Coordinator
from tinker.protocol.operations import Attach, Measured, OptimStep, Publish
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import AgentSpec, BarrierRule, EpisodeEnded, Held, RunSpec, Straggler, Submit
from tinker.protocol.to_host import MayUpdate, Missing, Opened, OperationFailed, Play, TurnRefused, UpdateEnded
from tinker.protocol.to_taskserver import Generate, Load, Unload
from tinker.protocol.values import AdamSpec, AgentName, Ended, EpisodeId, LoraSpec
from tinker.runtime.plain import from_text, to_text

STEP = OptimStep(AdamSpec(1e-3))


def lagging(*agents: AgentSpec, **changes: object) -> RunSpec:
    """Agent a one round behind at most, b two, unless told otherwise."""
    return run_spec(*(agents or (agent("a", 1, 1), agent("b", 1, 2))), **{"rounds": 5, **changes})


def attached(spec: RunSpec) -> Desk:
    desk = admitted(spec)
    for each in spec.agents:
        desk.publish(f"attach {each.name}", each.name, Attach(LoraSpec()), 0)
    return desk


def play(desk: Desk, round: int) -> list[object]:
    """Every episode of this rollout ends."""
    return desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(round, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))


def played(spec: RunSpec | None = None, rounds: int = 1) -> Desk:
    """So many rollouts are over, and nobody has updated."""
    desk = attached(spec or lagging())
    who = [each.name for each in (spec or lagging()).agents]
    for round in range(1, rounds + 1):
        desk.says(HOST, arrivals(who, round, ROLLOUT, START))
        play(desk, round)
    return desk


def update(desk: Desk, who: str, round: int, number: int) -> list[object]:
    """The agent's whole update of this round; returns what followed its end."""
    (may,) = of(MayUpdate, desk.says(HOST, arrival(who, round, UPDATE, START, number - 1)))
    assert may == MayUpdate(RUN, round, AgentName(who))
    desk.publish(f"{who} {number}", who, Publish(number), number)
    return desk.says(HOST, arrival(who, round, UPDATE, END, number, 0))


def reason(sends: list[object]) -> str:
    (refused,) = of(Refused, sends)
    return refused.reason


def test_updates_are_no_phase_and_the_next_rollout_begins_beside_them() -> None:
    desk = played()
    assert desk.core.runs[RUN].rounds.at == (2, ROLLOUT, START)
    desk.says(HOST, arrival("a", 1, UPDATE, START))
    assert of(Play, desk.says(HOST, arrivals("ab", 2, ROLLOUT, START)))
    desk.operate("step", "a", STEP)  # while the second rollout is played
    ((_, generate),) = desk.core.step(HOST, turn(0, seat(who="a"), round=2), 0.0)
    assert isinstance(generate, Generate)
    desk.says(SERVER, done("step", Measured(())))
    desk.publish("publish", "a", Publish(1), 1)
    assert desk.says(HOST, arrival("a", 1, UPDATE, END, 1)) == [UpdateEnded(RUN, 1, AgentName("a"))]
    assert desk.core.runs[RUN].rounds.at == (2, ROLLOUT, END)


def test_a_round_keeps_the_version_it_began_with_whatever_is_published_meanwhile() -> None:
    desk = played()
    desk.says(HOST, arrivals("ab", 2, ROLLOUT, START))
    update(desk, "a", 1, 1)
    ((_, refused),) = desk.core.step(HOST, turn(0, seat(number=1), round=2), 0.0)
    assert isinstance(refused, TurnRefused)
    assert "this round plays policy of a@0" in refused.reason
    assert kinds(desk.says(HOST, turn(0, seat(number=0), round=2))) == ["Generate"]


def test_a_rollout_waits_for_the_update_that_the_bound_asks_for() -> None:
    desk = played(rounds=2)
    assert "before its update of round 1 has ended; its max_lag is 1" in reason(
        desk.says(HOST, arrival("a", 3, ROLLOUT, START))
    )
    assert desk.says(HOST, arrival("b", 3, ROLLOUT, START)) == []  # b may be one more behind
    (missing,) = of(Missing, desk.keep(desk.core.tick(10.0)))
    assert missing.missing == ("a (its update of round 1 has not ended)",)
    update(desk, "a", 1, 1)
    (opened,) = of(Opened, desk.says(HOST, arrival("a", 3, ROLLOUT, START, 1)))
    assert opened.numbers == (1, 0)


def test_an_agent_may_come_with_any_version_within_the_bound_and_with_no_older_one() -> None:
    desk = played(lagging(agent("a", 1, 1)), rounds=1)
    desk.says(HOST, arrival("a", 2, ROLLOUT, START))
    update(desk, "a", 1, 1)
    play(desk, 2)
    update(desk, "a", 2, 2)
    assert "current is 2, the oldest for this round is 1" in reason(desk.says(HOST, arrival("a", 3, ROLLOUT, START, 0)))
    assert "current is 2, the oldest for this round is 1" in reason(desk.says(HOST, arrival("a", 3, ROLLOUT, START, 3)))
    (opened,) = of(Opened, desk.says(HOST, arrival("a", 3, ROLLOUT, START, 1)))
    assert opened.numbers == (1,)


def test_an_agent_updates_one_round_after_the_other() -> None:
    desk = played(rounds=2)
    assert desk.says(HOST, arrival("a", 2, UPDATE, START)) == []
    desk.says(HOST, arrival("a", 1, UPDATE, START))
    desk.publish("first", "a", Publish(1), 1)
    assert desk.says(HOST, arrival("a", 1, UPDATE, END, 1)) == [
        UpdateEnded(RUN, 1, AgentName("a")),
        MayUpdate(RUN, 2, AgentName("a")),
    ]
    desk = played(rounds=2)
    assert "before that of round 1" in reason(desk.says(HOST, arrival("a", 2, UPDATE, END)))


def test_one_agent_does_not_wait_for_another_unless_it_updates_after_it() -> None:
    desk = played()
    desk.says(HOST, arrival("a", 1, UPDATE, START))
    update(desk, "b", 1, 1)  # while a is busy
    desk = played(lagging(update_order=(("b",), ("a",))))
    assert desk.says(HOST, arrival("a", 1, UPDATE, START)) == []
    assert update(desk, "b", 1, 1) == [UpdateEnded(RUN, 1, AgentName("b")), MayUpdate(RUN, 1, AgentName("a"))]


def test_who_has_nothing_to_update_only_comes_back_and_whoever_comes_again_is_told_again() -> None:
    desk = played()
    ended = [UpdateEnded(RUN, 1, AgentName("a"))]
    assert desk.says(HOST, arrival("a", 1, UPDATE, END)) == ended
    assert desk.says(HOST, arrival("a", 1, UPDATE, END)) == ended
    assert "it is not due" in reason(desk.says(HOST, arrival("b", 1, UPDATE, START, samples=0)))
    desk.says(HOST, arrival("b", 1, UPDATE, START))
    assert desk.says(HOST, arrival("b", 1, UPDATE, START)) == [MayUpdate(RUN, 1, AgentName("b"))]
    desk.says(HOST, arrival("b", 1, UPDATE, END))
    assert not desk.core.runs[RUN].updates.gates
    assert desk.says(HOST, arrival("b", 1, UPDATE, END)) == [UpdateEnded(RUN, 1, AgentName("b"))]
    assert desk.says(HOST, arrival("b", 1, UPDATE, START)) == []


def test_nobody_updates_before_the_rollout_has_ended_or_without_being_admitted() -> None:
    desk = attached(lagging())
    desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
    assert "its rollout has not ended" in reason(desk.says(HOST, arrival("a", 1, UPDATE, START)))
    (failed,) = of(OperationFailed, desk.operate("step", "a", STEP))
    assert "may not update now" in failed.reason
    play(desk, 1)
    desk.says(HOST, arrival("a", 1, UPDATE, START))
    desk.operate("again", "a", STEP)
    assert "is still running" in reason(desk.says(HOST, arrival("a", 1, UPDATE, END)))
    assert of(Opened, desk.says(HOST, arrivals("ab", 2, ROLLOUT, START)))  # beside it


def test_an_update_has_ended_when_its_version_is_loaded_everywhere() -> None:
    desk = played()
    desk.says(HOST, arrival("a", 1, UPDATE, START))
    desk.publish("publish", "a", Publish(1), 1, workers=(R0,))
    assert desk.says(HOST, arrival("a", 1, UPDATE, END, 1)) == []
    assert kinds(desk.says(HOST, arrival("a", 1, UPDATE, END, 1))) == ["Load"]  # asked again
    assert desk.says(SERVER, loaded(R1, "a", 1)) == [UpdateEnded(RUN, 1, AgentName("a"))]


def test_versions_stay_loaded_as_long_as_a_round_may_ask_for_them_and_no_longer() -> None:
    desk = played(lagging(agent("a", 1, 2), rounds=9), rounds=2)
    for round in range(3, 9):
        desk.says(HOST, arrival("a", round, ROLLOUT, START, max(0, round - 3)))
        update(desk, "a", round - 2, round - 2)
        play(desk, round)
        kept = {version.version for version in desk.core.runs[RUN].versions.served}
        assert kept == {round - 3, round - 2}
    unloaded = of(Unload, [message for _, message in desk.heard])
    assert [each.version.version for each in unloaded if each.worker == R0] == [0, 1, 2, 3, 4]


def test_an_evaluation_waits_for_every_update_and_plays_the_newest_versions() -> None:
    desk = played(lagging(rounds=1, evaluations=1, evaluate_every=1))  # gathers at the base line first
    desk = attached(lagging(rounds=1, evaluations=1, evaluate_every=1))
    desk.says(HOST, arrivals("ab", 0, EVALUATE, START), EpisodeEnded(RUN, EpisodeId(0, EVALUATE, 0), Ended.FINISHED))
    desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
    play(desk, 1)
    assert "an evaluation waits for every update" in reason(desk.says(HOST, arrival("a", 1, EVALUATE, START)))
    update(desk, "a", 1, 1)
    desk.says(HOST, arrival("b", 1, UPDATE, END), arrival("b", 1, EVALUATE, START))
    (opened,) = of(Opened, desk.says(HOST, arrival("a", 1, EVALUATE, START, 1)))
    assert opened.numbers == (1, 0)


def test_who_is_late_for_a_rollout_is_left_out_of_its_round_and_its_update_goes_on() -> None:
    rule = BarrierRule(ROLLOUT, START, 2.0, Straggler.DROP)
    desk = played(lagging(agent("a", 1, 1), agent("b", 1, 1), barriers=(rule,)), rounds=2)
    desk.says(HOST, arrival("a", 1, UPDATE, START))
    update(desk, "b", 1, 1)
    desk.says(HOST, arrival("b", 3, ROLLOUT, START, 1))
    desk.operate("step", "a", STEP)
    desk.now = 3.0
    (opened,) = of(Opened, desk.keep(desk.core.tick(3.0)))
    assert (opened.members, opened.dropped, opened.numbers) == (("b",), ("a",), (0, 1))
    assert of(OperationFailed, desk.says(SERVER, done("step", Measured(())))) == []
    desk.publish("publish", "a", Publish(1), 1)
    assert desk.says(HOST, arrival("a", 1, UPDATE, END, 1)) == [UpdateEnded(RUN, 1, AgentName("a"))]
    play(desk, 3)
    assert "was left out of round 3" in reason(desk.says(HOST, arrival("a", 3, UPDATE, START, 1)))
    assert "before its update of round 2" in reason(desk.says(HOST, arrival("a", 4, ROLLOUT, START, 1)))
    update(desk, "a", 2, 2)
    assert desk.says(HOST, arrival("a", 4, ROLLOUT, START, 2)) == []  # a member again


def test_what_makes_no_sense_is_refused_before_anything_begins() -> None:
    desk = admitted()
    late = BarrierRule(UPDATE, END, 2.0)
    for spec, why in (
        (lagging(agent("a", 1, -1)), "agent a has max_lag -1; it must be 0"),
        (lagging(barriers=(late,)), "nobody waits where updates begin and end"),
    ):
        assert why in reason(desk.says(HOST, Submit(replace(spec, run=spec.run + "2"))))


@pytest.mark.parametrize("loaded_again", [True, False])
def test_a_coordinator_that_restarts_in_an_overlapped_round_goes_on_in_it(loaded_again: bool) -> None:
    desk = played()
    desk.says(HOST, arrivals("ab", 2, ROLLOUT, START), arrival("a", 1, UPDATE, START))
    desk.operate("step", "a", STEP)
    again = from_text(to_text(desk.core, Coordinator), Coordinator)
    again.turns.counts = again.counts
    assert canonical(again) == canonical(desk.core)
    again.restart(2, 1.0)
    desk = Desk(again, 2.0)
    host, server = (again.roster.away[name].hello for name in (HOST, SERVER))
    desk.join(replace(host, incarnation=1))
    holding = tuple(Held(RUN, worker, version, ref.digest) for worker in (R0, R1) for version, ref in _adapters(again))
    sends = desk.join(replace(server, incarnation=1, holding=holding if loaded_again else ()))
    assert len(of(Load, sends)) == (0 if loaded_again else 4)
    assert "step" in str(sends)  # its answer may have been lost
    for name in "ab":
        for worker in (R0, R1):
            desk.says(SERVER, loaded(worker, name, 0))
    assert desk.says(HOST, asked("step", "a", STEP)) == [each for each in sends if "step" in str(each)]
    desk.says(SERVER, done("step", Measured(())))
    desk.publish("publish", "a", Publish(1), 1)
    assert desk.says(HOST, arrival("a", 1, UPDATE, END, 1)) == [UpdateEnded(RUN, 1, AgentName("a"))]
    assert kinds(desk.says(HOST, turn(0, seat(number=0), round=2))) == ["Generate"]
    assert of(Opened, play(desk, 2))


def _adapters(core: Coordinator) -> list[tuple[object, object]]:
    return sorted(core.runs[RUN].versions.adapters.items())  # type: ignore[return-value]
