"""The global barriers of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from core_values import END, EVALUATE, ROLLOUT, START, UPDATE, agent, arrivals, run_spec

from coordinator.core import rounds as rnd
from coordinator.core.rounds import ArrivalRefused, Begin, Rounds
from tinker.protocol.to_coordinator import Arrivals
from tinker.protocol.to_host import MayUpdate, Opened
from tinker.protocol.values import Ended, PolicyName

Ready = Callable[[PolicyName, int], bool]


def always(_: PolicyName, __: int) -> bool:
    return True


def never(_: PolicyName, __: int) -> bool:
    return False


def go(state: Rounds, *came: Arrivals, ready: Ready = always) -> tuple[Rounds, list[object]]:
    effects: list[object] = []
    for each in came:
        state, new = rnd.arrive(state, each, ready, 1.0)
        effects += new
        assert rnd.violations(state, ready) == []
    return state, effects


def both(round: int, phase: object, edge: object, number: int = 0, samples: tuple[int, int] = (1, 1)) -> list[Arrivals]:
    return [arrivals(who, round, phase, edge, number, n) for who, n in zip("ab", samples, strict=True)]  # type: ignore[arg-type]


def account_all(state: Rounds) -> tuple[Rounds, list[object]]:
    effects: list[object] = []
    for episode in sorted(state.unaccounted):
        state, new = rnd.account(state, episode, Ended.FINISHED, 2.0)
        effects += new
    return state, effects


def at_update_end(*agents: object, **changes: object) -> tuple[Rounds, list[object]]:
    state = rnd.begin(run_spec(*agents, **changes))  # type: ignore[arg-type]
    state, _ = go(state, *both(1, ROLLOUT, START))
    state, _ = account_all(state)
    return go(state, *both(1, UPDATE, START, samples=(1, 1)))


@pytest.mark.parametrize(
    ("evaluations", "every", "expected"),
    [
        (0, 1, "RU RU RU RU"),
        (2, 0, "RU RU RU RU"),
        (2, 1, "E RUE RUE RUE RUE"),
        (2, 3, "E RU RU RUE RUE"),
        (2, 9, "E RU RU RU RUE"),
    ],
)
def test_which_phases_a_round_has(evaluations: int, every: int, expected: str) -> None:
    spec = run_spec(rounds=4, evaluations=evaluations, evaluate_every=every)
    words = ["".join(phase[0].upper() for phase in rnd.phases(spec, round)) for round in range(5)]
    assert " ".join(word for word in words if word) == expected


def test_rollout_starts_when_everybody_has_come_and_gives_out_the_groups() -> None:
    state = rnd.begin(run_spec(groups=2, group_size=2))
    state, effects = go(state, arrivals("b", 1, ROLLOUT, START))
    assert effects == [] and rnd.missing(state) == ("a",)
    state, (opened, begin) = go(state, arrivals("a", 1, ROLLOUT, START))  # type: ignore[misc]
    assert isinstance(opened, Opened) and [wait.member for wait in opened.waits] == ["b", "a"]
    assert isinstance(begin, Begin) and [[e.index for e in group] for group in begin.groups] == [[0, 1], [2, 3]]


def test_an_agent_is_held_until_its_version_is_ready() -> None:
    state = rnd.begin(run_spec())
    state, effects = go(state, *both(1, ROLLOUT, START), ready=never)
    assert effects == [] and rnd.missing(state) == ("a (its version is loading)", "b (its version is loading)")
    state, woken = rnd.settle(state, always, 3.0)
    assert [type(each) for each in woken] == [Opened, Begin] and state.held == {}


def test_an_agent_that_is_held_and_arrives_again_stays_as_it_came() -> None:
    state, _ = go(rnd.begin(run_spec()), *both(1, ROLLOUT, START))
    state, _ = account_all(state)
    first, other = both(1, UPDATE, START, samples=(3, 0))[0], both(1, UPDATE, START, number=7, samples=(9, 0))[0]
    held, _ = go(state, first, ready=never)
    again, effects = go(held, other, ready=never)
    assert (again, effects) == (held, [])
    assert (again.samples["a"], again.held["a"].version) == (3, 0)  # type: ignore[index]


def test_the_rollout_ends_with_its_last_episode() -> None:
    state, _ = go(rnd.begin(run_spec()), *both(1, ROLLOUT, START))
    first, last = sorted(state.unaccounted)
    state, effects = rnd.account(state, first, Ended.FAILED, 2.0)
    assert effects == ()
    state, effects = rnd.account(state, first, Ended.FINISHED, 2.0)
    assert effects == () and state.ended == {Ended.FAILED: 1}
    state, effects = rnd.account(state, last, Ended.DROPPED, 2.0)
    assert [(e.phase, e.edge) for e in effects if isinstance(e, Opened)] == [(ROLLOUT, END)]
    assert state.at == (1, UPDATE, START)


def test_an_agent_without_a_batch_keeps_its_version_and_blocks_nobody() -> None:
    state, _ = go(rnd.begin(run_spec()), *both(1, ROLLOUT, START))
    state, _ = account_all(state)
    state, effects = go(state, *both(1, UPDATE, START, samples=(1, 0)))
    assert [e.agent for e in effects if isinstance(e, MayUpdate)] == ["a"]
    state, _ = go(state, arrivals("b", 1, UPDATE, END, 0), arrivals("a", 1, UPDATE, END, 1))
    assert state.finished and state.versions == {"a": 1, "b": 0}


def test_when_nobody_has_a_batch_the_round_ends_without_an_update() -> None:
    state, _ = go(rnd.begin(run_spec()), *both(1, ROLLOUT, START))
    state, _ = account_all(state)
    state, effects = go(state, *both(1, UPDATE, START, samples=(0, 0)), *both(1, UPDATE, END))
    assert not any(isinstance(e, MayUpdate) for e in effects) and state.finished


def test_a_frozen_agent_is_never_admitted_and_never_waited_for_at_the_gate() -> None:
    state, effects = at_update_end(agent("a", 0), agent("b"), update_order=(("a",), ("b",)))
    assert [e.agent for e in effects if isinstance(e, MayUpdate)] == ["b"]
    state, _ = go(state, *both(1, UPDATE, END))
    assert state.finished


def test_in_turn_the_next_agent_is_admitted_when_the_version_of_the_one_before_is_ready() -> None:
    state, effects = at_update_end(update_order=(("b",), ("a",)))
    assert [e.agent for e in effects if isinstance(e, MayUpdate)] == ["b"]
    with pytest.raises(ArrivalRefused, match="a has not been admitted"):
        rnd.arrive(state, arrivals("a", 1, UPDATE, END, 1), always, 3.0)
    state, effects = go(state, arrivals("b", 1, UPDATE, END, 1), ready=never)
    assert effects == []
    state, woken = rnd.settle(state, always, 4.0)
    assert woken == (MayUpdate(state.spec.run, 1, "a"),)  # type: ignore[arg-type]


def test_arrivals_that_come_again_get_the_same_answer_and_change_nothing() -> None:
    state, (opened, begin) = go(rnd.begin(run_spec()), *both(1, ROLLOUT, START))  # type: ignore[misc]
    assert rnd.arrive(state, arrivals("a", 1, ROLLOUT, START), always, 9.0) == (state, (opened, begin))
    state, _ = account_all(state)
    assert rnd.arrive(state, arrivals("a", 1, ROLLOUT, START), always, 9.0) == (state, (opened,))


def test_who_missed_the_gate_or_the_end_of_a_phase_is_told_again() -> None:
    state, _ = go(rnd.begin(run_spec(update_order=(("b",), ("a",)))), *both(1, ROLLOUT, START))
    episodes = sorted(state.unaccounted)
    state, effects = account_all(state)
    assert rnd.accounted(state, episodes[0]) == (effects[-1],)
    state, _ = go(state, *both(1, UPDATE, START))
    again = [rnd.arrive(state, arrivals(who, 1, UPDATE, START), always, 9.0)[1][1:] for who in "ab"]
    assert again == [(), (MayUpdate(state.spec.run, 1, "b"),)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (arrivals("z", 1, ROLLOUT, START), "has no agent 'z'; its agents are a, b"),
        (
            arrivals("a", 2, ROLLOUT, START),
            "the start of rollout in round 2, the run gathers at the start of rollout in round 1",
        ),
        (arrivals("a", 1, UPDATE, END), "gathers at the start of rollout"),
        (arrivals("a", 0, EVALUATE, START), "gathers at the start of rollout"),
    ],
)
def test_an_arrival_elsewhere_is_refused(wrong: Arrivals, why: str) -> None:
    with pytest.raises(ArrivalRefused, match=why):
        rnd.arrive(rnd.begin(run_spec()), wrong, always, 0.0)


def test_nobody_arrives_where_only_episodes_are_waited_for() -> None:
    state, _ = go(rnd.begin(run_spec()), *both(1, ROLLOUT, START))
    with pytest.raises(ArrivalRefused, match="when every episode is accounted for"):
        rnd.arrive(state, arrivals("a", 1, ROLLOUT, END), always, 0.0)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (run_spec(agent("a"), agent("a")), "each name once"),
        (run_spec(rounds=0), "rounds is 0"),
        (run_spec(groups=0), "groups is 0"),
        (run_spec(group_size=-1), "group_size is -1"),
        (run_spec(update_order=(("a", "z"),)), "it may name each of"),
        (run_spec(update_order=(("a",), ("a",))), "it may name each of"),
    ],
)
def test_a_specification_without_sense_is_refused(spec: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        rnd.begin(spec)  # type: ignore[arg-type]


def test_agents_that_come_together_arrive_in_one_step() -> None:
    state, effects = go(rnd.begin(run_spec(agent("a"), agent("b"), agent("c"))), arrivals("ca", 1, ROLLOUT, START))
    assert effects == [] and rnd.missing(state) == ("b",)
    state, (opened, _) = go(state, arrivals("ab", 1, ROLLOUT, START))  # type: ignore[misc]
    assert isinstance(opened, Opened) and [wait.member for wait in opened.waits] == ["c", "a", "b"]


def test_together_or_one_by_one_they_come_to_the_same_state() -> None:
    state, _ = at_update_end()
    together = go(state, arrivals("ba", 1, UPDATE, END, 1))
    assert together == go(state, arrivals("b", 1, UPDATE, END, 1), arrivals("a", 1, UPDATE, END, 1))


def test_of_agents_that_come_together_those_whose_version_is_not_ready_are_held() -> None:
    def half(policy: PolicyName, _: int) -> bool:
        return policy == "policy of a"

    state, effects = go(rnd.begin(run_spec()), arrivals("ab", 1, ROLLOUT, START), ready=half)
    assert effects == [] and rnd.missing(state) == ("b (its version is loading)",)
    state, effects = go(state, arrivals("ab", 1, ROLLOUT, START), ready=half)
    assert effects == [] and list(state.held) == ["b"]
    _, (opened, _) = rnd.settle(state, always, 3.0)  # type: ignore[misc]
    assert isinstance(opened, Opened) and [wait.seconds for wait in opened.waits] == [2.0, 0.0]


def test_if_one_of_them_may_not_come_nobody_has_come() -> None:
    state, _ = at_update_end(update_order=(("b",), ("a",)))
    with pytest.raises(ArrivalRefused, match="a has not been admitted"):
        rnd.arrive(state, arrivals("ba", 1, UPDATE, END, 1), always, 3.0)


def test_the_samples_of_agents_that_come_together_are_their_own() -> None:
    state, _ = go(rnd.begin(run_spec()), arrivals("ab", 1, ROLLOUT, START))
    state, _ = account_all(state)
    message = replace(arrivals("ab", 1, UPDATE, START), samples=(0, 3))
    state, effects = go(state, message)
    assert [e.agent for e in effects if isinstance(e, MayUpdate)] == ["b"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"agents": ()}, "0 different agents"),
        ({"agents": ("a", "a")}, "1 different agents in columns of 2 agents, 2 versions and 2 samples"),
        ({"versions": (0,)}, "2 agents, 1 versions"),
        ({"samples": (1, 1, 1)}, "2 versions and 3 samples"),
        ({"agents": ("a", "z")}, "has no agent 'z'"),
        ({"round": 2}, r"a \(with 1 more\) arrives at the start of rollout in round 2"),
    ],
)
def test_arrivals_whose_columns_do_not_fit_are_refused(changes: dict[str, object], why: str) -> None:
    wrong = replace(arrivals("ab", 1, ROLLOUT, START), **changes)  # type: ignore[arg-type]
    with pytest.raises(ArrivalRefused, match=why):
        rnd.arrive(rnd.begin(run_spec()), wrong, always, 0.0)
