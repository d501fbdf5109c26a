"""Deadlines of the global barriers: who is waited for, who is left out, when a run stops; and what arrivals must agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_values import (
    END,
    EVALUATE,
    ROLLOUT,
    RUN,
    START,
    UPDATE,
    agent,
    arrival,
    arrivals,
    blob,
    canonical,
    run_spec,
    turn,
    version,
)
from test_core_coordinator import HOST, R0, R1, SERVER, Desk, admitted, done, kinds, loaded, of, seat

from coordinator.core.coordinator import NOTICE
from tinker.protocol.operations import Attach, ForwardBackward, Measured, OptimStep, Publish, Published, Rewind
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import BarrierRule, EpisodeEnded, RunSpec, Straggler, Submit
from tinker.protocol.to_host import MayUpdate, Missing, Opened, OperationFailed, Play, RunStopped, TurnRefused
from tinker.protocol.to_taskserver import Cancel
from tinker.protocol.values import AdamSpec, Edge, Ended, EpisodeId, LoraSpec, LossSpec, Phase

DROP, FAIL, WAIT = Straggler.DROP, Straggler.FAIL, Straggler.WAIT


def ruled(*rules: BarrierRule, who: str = "ab", **changes: object) -> RunSpec:
    return run_spec(*map(agent, who), **{"rounds": 2, "barriers": rules, **changes})


def rule(phase: Phase, edge: Edge, straggler: Straggler = DROP, quorum: int = 1) -> BarrierRule:
    return BarrierRule(phase, edge, 2.0, straggler, quorum)


def gathered(spec: RunSpec) -> Desk:
    """Every agent has its version 0, and nobody has arrived."""
    desk = admitted(spec)
    for each in spec.agents:
        desk.publish(f"attach {each.name}", each.name, Attach(LoraSpec()), 0)
    return desk


def at(desk: Desk, now: float) -> list[object]:
    """The coordinator looks at its clock."""
    desk.now = now
    return desk.keep(desk.core.tick(now))


def rolled_out(spec: RunSpec, who: str = "ab") -> Desk:
    """All episodes of round 1 are accounted for."""
    desk = gathered(spec)
    desk.says(HOST, arrivals(who, 1, ROLLOUT, START))
    desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
    return desk


def updating(spec: RunSpec, who: str = "ab") -> Desk:
    desk = rolled_out(spec, who)
    desk.says(HOST, arrivals(who, 1, UPDATE, START))
    return desk


def finish(desk: Desk, op: str, result: object) -> list[object]:
    return desk.says(SERVER, done(op, result))


class TestStragglers:
    def test_a1_whoever_is_late_is_named_told_that_the_round_is_closed_and_back_in_the_next_one(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START), who="abcd"))
        desk.says(HOST, *(arrival(who, 1, ROLLOUT, START) for who in "abc"))
        assert at(desk, 1.9) == []
        (opened,) = of(Opened, at(desk, 2.1))
        assert (opened.round, opened.members, opened.dropped) == (1, ("a", "b", "c"), ("d",))
        assert at(desk, 2.6) == []  # one decision
        desk.now, before = 3.0, canonical(desk.core.runs)
        (again, play) = desk.says(HOST, arrival("d", 1, ROLLOUT, START))
        assert again == opened and isinstance(play, Play)
        assert canonical(desk.core.runs) == before
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
        desk.says(HOST, arrivals("abc", 1, UPDATE, START, samples=0), arrivals("abc", 1, UPDATE, END))
        assert desk.core.runs[RUN].rounds.barrier.missing == ("a", "b", "c", "d")
        assert of(Opened, desk.says(HOST, arrivals("abc", 2, ROLLOUT, START))) == []
        (opened,) = of(Opened, desk.says(HOST, arrival("d", 2, ROLLOUT, START)))
        assert opened.members == ("a", "b", "c", "d") and opened.dropped == ()

    def test_a1_or_the_run_stops_and_the_reason_names_barrier_round_members_and_time(self) -> None:
        desk = gathered(ruled(rule(UPDATE, START, FAIL), who="abc"))
        desk.says(HOST, arrivals("abc", 1, ROLLOUT, START))
        desk.now = 5.0
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
        desk.says(HOST, arrival("b", 1, UPDATE, START))
        assert of(RunStopped, at(desk, 6.9)) == []
        (stopped,) = of(RunStopped, at(desk, 7.5))
        assert "the start of update in round 1 did not open in 2.5 s, its deadline is 2 s" in stopped.reason
        assert "missing are a, c. " in stopped.reason and "barriers.update_start" in stopped.reason
        assert desk.says(HOST, arrival("a", 1, UPDATE, START)) == [stopped]

    def test_or_they_are_waited_for_and_named_at_the_deadline_and_every_ten_seconds(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START, WAIT)))
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        assert of(Missing, at(desk, 1.9)) == []
        assert [each.missing for each in of(Missing, at(desk, 2.1))] == [("b",)]
        assert of(Missing, at(desk, 3.0)) == []
        assert [each.missing for each in of(Missing, at(desk, 2.1 + NOTICE))] == [("b",)]
        assert of(Opened, desk.says(HOST, arrival("b", 1, ROLLOUT, START)))[0].dropped == ()

    def test_below_the_quorum_the_run_stops(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START, DROP, 2), who="abc"))
        desk.says(HOST, arrival("c", 1, ROLLOUT, START))
        (stopped,) = of(RunStopped, at(desk, 2.0))
        assert "missing are a, b (come are 1, the quorum is 2)" in stopped.reason

    def test_an_agent_whose_version_is_not_loaded_is_left_out_and_says_why(self) -> None:
        desk = admitted(ruled(rule(ROLLOUT, START)))
        desk.publish("attach a", "a", Attach(LoraSpec()), 0)
        desk.publish("attach b", "b", Attach(LoraSpec()), 0, workers=())
        desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
        assert desk.core.runs[RUN].rounds.held.keys() == {"b"}
        (opened,) = of(Opened, at(desk, 2.0))
        assert opened.dropped == ("b",) and desk.core.runs[RUN].rounds.held == {}

    def test_each_gathering_has_a_deadline_of_its_own(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START), rule(UPDATE, START)))
        desk.now = 1.5
        desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
        assert kinds(at(desk, 20.0)) == ["Missing"]  # the end of rollout has none
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
        desk.says(HOST, arrival("a", 1, UPDATE, START))
        assert of(Opened, at(desk, 21.9)) == []
        assert [each.dropped for each in of(Opened, at(desk, 22.0))] == [("b",)]

    def test_after_a_restart_the_deadline_counts_anew(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START, FAIL)))
        desk.core.restart(2, 100.0)
        desk.core.tick(101.9)
        assert RUN in desk.core.runs
        desk.core.tick(102.0)
        assert RUN not in desk.core.runs

    def test_what_arrives_before_the_tick_has_arrived(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START)))
        desk.now = 2.5
        (opened,) = of(Opened, desk.says(HOST, arrivals("ab", 1, ROLLOUT, START)))
        assert opened.dropped == ()


class TestWhoIsLeftOut:
    def test_a2_an_agent_without_a_batch_keeps_its_version_and_blocks_nobody(self) -> None:
        desk = rolled_out(ruled(who="xyz"), "xyz")
        samples = replace(arrivals("xyz", 1, UPDATE, START), samples=(2, 0, 2))
        assert [each.agent for each in of(MayUpdate, desk.says(HOST, samples))] == ["x", "z"]
        for who in "xz":
            desk.publish(f"publish {who}", who, Publish(1), 1)
        (opened,) = of(Opened, desk.says(HOST, replace(arrivals("xyz", 1, UPDATE, END), versions=(1, 0, 1))))
        assert opened.numbers == (1, 0, 1) and opened.dropped == ()
        desk.says(HOST, replace(arrivals("xyz", 2, ROLLOUT, START), versions=(1, 0, 1)))
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(2, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
        everybody = replace(arrivals("xyz", 2, UPDATE, START), versions=(1, 0, 1), samples=(2, 2, 2))
        assert [each.agent for each in of(MayUpdate, desk.says(HOST, everybody))] == ["x", "y", "z"]

    def test_it_counts_as_arrived_for_what_is_left_of_the_round(self) -> None:
        spec = ruled(rule(ROLLOUT, START), evaluate_every=1, evaluations=1)
        desk = gathered(spec)
        desk.says(
            HOST, arrivals("ab", 0, EVALUATE, START), EpisodeEnded(RUN, EpisodeId(0, EVALUATE, 0), Ended.FINISHED)
        )
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        at(desk, 2.0)
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
        sends = desk.says(HOST, arrivals("ab", 1, UPDATE, START))  # b's arrival changes nothing
        assert [each.agent for each in of(MayUpdate, sends)] == ["a"]
        assert [each.members for each in of(Opened, sends)] == [("a",)]
        assert of(Opened, desk.says(HOST, arrival("a", 1, UPDATE, END)))
        assert of(Opened, desk.says(HOST, arrival("a", 1, EVALUATE, START)))
        desk.says(HOST, EpisodeEnded(RUN, EpisodeId(1, EVALUATE, 0), Ended.FINISHED))
        assert desk.core.runs[RUN].rounds.barrier.missing == ("a", "b")

    def test_one_that_was_held_at_the_start_of_the_update_is_not_admitted(self) -> None:
        desk = rolled_out(ruled(rule(UPDATE, START)))
        desk.core.runs[RUN].versions = replace(
            desk.core.runs[RUN].versions,
            served={version("a", 0): frozenset({R0, R1})},
            loading=frozenset({version("b", 0).policy}),
        )
        desk.says(HOST, arrivals("ab", 1, UPDATE, START))
        sends = at(desk, 2.0)
        assert [each.agent for each in of(MayUpdate, sends)] == ["a"]

    def test_its_seats_play_the_version_it_kept(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, START)))
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        (opened,) = of(Opened, at(desk, 2.0))
        assert opened.numbers == (0, 0)
        assert kinds(desk.says(HOST, turn(0, seat("x", "b", 0)))) == ["Generate"]
        assert kinds(desk.says(HOST, turn(0, seat("x", "b", 1), index=1))) == ["TurnRefused"]


class TestFencing:
    def test_an_update_that_has_not_ended_is_refused_from_then_on(self) -> None:
        desk = updating(ruled(rule(UPDATE, END)))
        desk.says(HOST, arrival("a", 1, UPDATE, END))
        (opened,) = of(Opened, at(desk, 2.0))
        assert opened.dropped == ("b",)
        (failed,) = desk.operate("publish b", "b", Publish(1))
        assert isinstance(failed, OperationFailed) and "may not update now" in failed.reason
        assert desk.core.counts["refused Operate"] == 1

    def test_even_when_the_run_has_no_further_round(self) -> None:
        desk = updating(ruled(rule(UPDATE, END), rounds=1))
        desk.says(HOST, arrival("a", 1, UPDATE, END))
        at(desk, 2.0)
        (failed,) = desk.operate("publish b", "b", Publish(1))
        assert isinstance(failed, OperationFailed) and "b was left out of round 1" in failed.reason

    def test_what_its_worker_was_doing_has_failed_whatever_the_worker_says(self) -> None:
        desk = updating(ruled(rule(UPDATE, END)))
        desk.says(HOST, arrival("a", 1, UPDATE, END))
        assert kinds(desk.operate("publish b", "b", Publish(1))) == ["Work"]
        opened, failed = at(desk, 2.0)
        assert isinstance(opened, Opened) and isinstance(failed, OperationFailed) and "b was left out" in failed.reason
        assert finish(desk, "publish b", Published(version("b", 1), blob("b1"))) == []
        assert desk.core.counts["late results"] == 1
        assert desk.core.runs[RUN].versions.current[version("b", 1).policy] == 0

    def test_it_goes_on_in_the_next_round_from_its_published_version_under_a_new_number(self) -> None:
        desk = updating(ruled(rule(UPDATE, END)))
        desk.operate("publish b", "b", Publish(1))
        desk.says(HOST, arrival("a", 1, UPDATE, END))
        at(desk, 2.0)
        finish(desk, "publish b", Published(version("b", 1), blob("b1")))
        (opened,) = of(Opened, desk.says(HOST, arrivals("ab", 2, ROLLOUT, START)))
        assert opened.numbers == (0, 0)
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(2, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
        assert [each.agent for each in of(MayUpdate, desk.says(HOST, arrivals("ab", 2, UPDATE, START)))] == ["a", "b"]
        for what in (
            ForwardBackward(blob("rows"), LossSpec("importance_sampling")),
            OptimStep(AdamSpec(1.0)),
            Publish(2),
        ):
            (failed,) = desk.operate(f"too early {what}", "b", what)
            assert isinstance(failed, OperationFailed)
            assert failed.reason == "b was left out of an update: rewind it to policy of b@0 first"
        (failed,) = desk.operate("rewind to others", "b", Rewind(blob("b1")))
        assert isinstance(failed, OperationFailed) and "only be rewound to policy of b@0" in failed.reason
        assert kinds(desk.operate("rewind", "b", Rewind(blob("b0")))) == ["Work"]
        finish(desk, "rewind", Measured(()))
        desk.publish("publish b again", "b", Publish(2), 2)
        assert of(Opened, desk.says(HOST, replace(arrivals("ab", 2, UPDATE, END), versions=(0, 2))))
        assert desk.core.runs[RUN].rounds.finished

    def test_one_whose_turn_to_update_has_not_come_is_left_out_too_and_the_notice_says_why(self) -> None:
        desk = updating(ruled(rule(UPDATE, END), update_order=(("a",), ("b",)), who="abc"), "abc")
        assert desk.core.runs[RUN].rounds.order.admitted == ("a",)
        desk.operate("step a", "a", OptimStep(AdamSpec(1.0)))
        (stopped,) = of(RunStopped, at(desk, 2.0))
        assert "a, b (others update before it), c (others update before it)" in stopped.reason

    def test_a_published_version_that_was_not_loaded_in_time_is_played_from_the_next_round_on(self) -> None:
        desk = updating(ruled(rule(UPDATE, END), evaluate_every=1, evaluations=0))
        desk.publish("publish b", "b", Publish(1), 1, workers=())
        desk.says(HOST, arrival("a", 1, UPDATE, END), arrival("b", 1, UPDATE, END, 1))
        (opened,) = of(Opened, at(desk, 2.0))
        assert opened.dropped == ("b",) and opened.numbers == (0, 0)
        desk.says(SERVER, loaded(R0, "b", 1), loaded(R1, "b", 1))
        (opened,) = of(Opened, desk.says(HOST, replace(arrivals("ab", 2, ROLLOUT, START), versions=(0, 1))))
        assert opened.numbers == (0, 1)


class TestEpisodes:
    def test_a_missing_episode_is_dropped_its_turn_is_given_up_and_its_late_account_changes_nothing(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, END)))
        desk.says(HOST, arrivals("ab", 1, ROLLOUT, START), turn(0, seat(), index=1))
        first, late = (EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1))
        desk.says(HOST, first)
        sends = at(desk, 2.0)
        (opened,) = of(Opened, sends)
        assert opened.dropped == ("1/rollout/1",) and len(of(Cancel, sends)) == 1
        rounds = desk.core.runs[RUN].rounds
        assert rounds.ended == {Ended.FINISHED: 1, Ended.DROPPED: 1} and rounds.at == (1, UPDATE, START)
        assert desk.says(HOST, late) == [opened]
        assert isinstance(desk.says(HOST, turn(1, seat(), index=1))[0], TurnRefused)
        assert desk.core.runs[RUN].rounds == rounds and desk.core.counts["dropped episodes"] == 1

    @pytest.mark.parametrize("order", ["account first", "deadline first"])
    def test_a4_an_episode_has_one_end_whichever_came_first(self, order: str) -> None:
        desk = gathered(ruled(rule(ROLLOUT, END)))
        desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
        desk.says(HOST, EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, 0), Ended.FINISHED))
        account = EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, 1), Ended.FORFEITED)
        desk.now = 2.0
        if order == "account first":
            desk.says(HOST, account)
            at(desk, 2.0)
        else:
            at(desk, 2.0)
            desk.says(HOST, account)
        last = Ended.FORFEITED if order == "account first" else Ended.DROPPED
        assert desk.core.runs[RUN].rounds.ended == {Ended.FINISHED: 1, last: 1}

    def test_a5_when_no_episode_can_come_any_more_the_round_ends_with_what_there_is(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, END), rounds=1, group_size=5))
        desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
        desk.says(HOST, *(EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in range(4)))
        (opened,) = of(Opened, at(desk, 2.0))
        assert opened.dropped == ("1/rollout/4",)
        desk.says(HOST, arrivals("ab", 1, UPDATE, START, samples=0), arrivals("ab", 1, UPDATE, END))
        assert desk.core.runs[RUN].rounds.finished

    def test_the_quorum_of_episodes_is_counted_in_episodes_and_the_reason_names_each(self) -> None:
        desk = gathered(ruled(rule(ROLLOUT, END, DROP, 2), group_size=3))
        desk.says(HOST, arrivals("ab", 1, ROLLOUT, START))
        desk.says(HOST, EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, 1), Ended.FAILED))
        (stopped,) = of(RunStopped, at(desk, 2.0))
        assert "the end of rollout in round 1" in stopped.reason
        assert "1/rollout/0, 1/rollout/2 (come are 1, the quorum is 2)" in stopped.reason


class TestAgreement:
    def test_who_has_other_weights_than_those_published_is_refused_by_name(self) -> None:
        desk = gathered(ruled())
        before = canonical(desk.core.runs)
        wrong = replace(arrivals("ab", 1, ROLLOUT, START), digests=("a0", "other"))
        (refused,) = desk.says(HOST, wrong)
        assert isinstance(refused, Refused)
        assert refused.reason == "b arrives with digest other of policy of b@0, published is b0"
        assert canonical(desk.core.runs) == before
        assert of(Opened, desk.says(HOST, replace(wrong, digests=("a0", "b0"))))

    def test_who_comes_alone_says_so_too(self) -> None:
        desk = gathered(ruled())
        (refused,) = desk.says(HOST, replace(arrival("a", 1, ROLLOUT, START), digest="x"))
        assert isinstance(refused, Refused) and "a arrives with digest x" in refused.reason

    def test_who_comes_with_another_version_is_refused_by_name(self) -> None:
        desk = gathered(ruled())
        (refused,) = desk.says(HOST, replace(arrivals("ab", 1, ROLLOUT, START), versions=(0, 3)))
        assert isinstance(refused, Refused) and "b arrives with version 3" in refused.reason

    def test_digests_of_what_was_never_published_are_refused(self) -> None:
        desk = admitted(ruled())
        (refused,) = desk.says(HOST, replace(arrival("a", 1, ROLLOUT, START), digest="x"))
        assert isinstance(refused, Refused) and "published is nothing yet" in refused.reason


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ((rule(ROLLOUT, START), rule(ROLLOUT, START, FAIL)), "given twice"),
        ((BarrierRule(ROLLOUT, START, -1.0),), "deadline -1.0"),
        ((BarrierRule(ROLLOUT, START, float("inf")),), "deadline inf"),
        ((rule(UPDATE, END, DROP, 0),), "quorum 0"),
        ((rule(UPDATE, END, DROP, 3),), "quorum 3; it must be at least 1, and 2 can come"),
        ((rule(ROLLOUT, END, DROP, 3),), "the end of rollout has the quorum 3"),
    ],
)
def test_rules_without_sense_are_refused(rules: tuple[BarrierRule, ...], why: str) -> None:
    desk = admitted(ruled())
    (refused,) = desk.says(HOST, Submit(replace(ruled(*rules), run="other")))  # type: ignore[arg-type]
    assert isinstance(refused, Refused) and why in refused.reason
