"""What the rows of a run say together."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agents.report import Fate
from coordinator.app import findings
from coordinator.app.progress import Change, Row


def train(round: int, agent: str = "ann", **values: Any) -> Row:
    return {"round": round, "agent": agent, "phase": "train", **values}


def evaluate(round: int, agent: str = "ann", mode: str = "greedy", **values: Any) -> Row:
    return {"round": round, "agent": agent, "phase": "evaluate", "evaluation": "held-out", "mode": mode, **values}


def test_training_compares_the_first_five_rounds_with_the_last_ten() -> None:
    rows = [train(r, reward_mean=float(r)) for r in range(1, 31)]
    assert findings.changes(rows) == (Change("reward of ann", 3.0, 25.5, "1-5", "21-30"),)


def test_the_windows_of_a_short_run_do_not_overlap() -> None:
    rows = [train(r, reward_mean=float(r)) for r in range(1, 5)]
    assert findings.changes(rows) == (Change("reward of ann", 1.5, 3.5, "1-2", "3-4"),)


def test_a_measure_of_the_whole_table_is_one_line() -> None:
    rows = [train(r, agent, **{"measure/success": r / 2}) for r in (1, 2) for agent in ("ann", "bob")]
    assert findings.changes(rows, "success") == (Change("success", 0.5, 1.0, "1", "2"),)


def test_a_measure_that_differs_is_a_line_per_agent() -> None:
    rows = [
        train(r, agent, **{"measure/wins": worth}) for r in (1, 2) for agent, worth in (("ann", 0.25), ("bob", 0.75))
    ]
    assert [each.what for each in findings.changes(rows, "wins")] == ["wins, ann", "wins, bob"]


def test_forfeits_are_a_line_for_each_agent_that_had_some() -> None:
    rows = [train(r, agent, forfeits=often) for r in (1, 2) for agent, often in (("ann", 3 - r), ("bob", 0))]
    assert findings.changes(rows) == (Change("forfeits of ann per round", 2.0, 1.0, "1", "2"),)


def test_an_evaluation_compares_its_first_round_with_its_last() -> None:
    rows = [
        evaluate(r, mode=mode, value=r / 10 + bonus)
        for r in (5, 0, 10)
        for mode, bonus in (("greedy", 0), ("sampled", 1))
    ]
    assert findings.changes(rows) == (
        Change("held-out, greedy", 0.0, 1.0, "0", "10"),
        Change("held-out, sampled", 1.0, 2.0, "0", "10"),
    )


def test_rounds_without_a_number_are_left_out_of_the_average() -> None:
    rows = [
        train(1, reward_mean=1.0),
        train(2, reward_mean=math.nan),
        train(3, reward_mean=None),
        train(4),
        train(5, reward_mean=3.0),
    ]
    assert findings.changes(rows) == (Change("reward of ann", 1.0, 3.0, "1", "5"),)


def test_counts_are_per_agent_and_what_never_happened_is_left_out() -> None:
    rows = [
        {**train(1, cut=1, failed=0), "count/cut": 5, "count/strange": 2},
        train(2, cut=2),
        train(1, "bob", forfeits=3),
    ]
    assert findings.counts(rows) == {
        "cut": {"ann": 3},
        "count/cut": {"ann": 5},
        "count/strange": {"ann": 2},
        "forfeits": {"bob": 3},
    }


def test_whatever_a_row_counts_has_a_meaning() -> None:
    report = {f"count/{fate}" for fate in Fate if fate != Fate.TRAINED}
    assert report <= set(findings.COUNTED)


def test_the_work_of_the_rounds_adds_up_to_them() -> None:
    spent = {"round": 10.0, "engine": 8.0, "scenario": 0.5, "coordination": 1.7}
    assert findings.work(spent) == {"engine (the model)": 8.0, "scenario code": 0.5, "coordination": 1.5}
    at_once = findings.work({"round": 10.0, "engine": 12.0, "scenario": 1.0})
    assert at_once == {"engine (the model)": 12.0, "scenario code": 1.0, "engine and scenario at once": -3.0}
    assert findings.work({"rollout": 1.0}) == {}


def test_the_phases_add_up_to_the_run() -> None:
    spent = {"round": 5.0, "rollout": 3.0, "update": 1.0, "evaluate": 2.0}
    assert findings.phases(spent, 10.0) == {"rollout": 3.0, "update": 1.0, "evaluate": 2.0, "everything else": 4.0}
    assert findings.phases(spent, 5.0)["everything else"] == 0.0


def test_the_time_of_a_round_counts_once_however_many_agents_say_it() -> None:
    rows = [
        train(r, agent, **{"seconds/rollout": 3.0, "seconds/update": 1.0, "seconds/coordination": 0.2})
        for r in (1, 2)
        for agent in ("ann", "bob")
    ]
    spent = findings.seconds(rows)
    assert spent == pytest.approx({"rollout": 6.0, "update": 2.0, "coordination": 0.4})
    assert findings.coordination_share(spent) == pytest.approx(0.05)


HEALTHY: dict[str, Any] = {
    "rows": 64,
    "episodes": 64,
    "cut": 0,
    "entropy": 1.0,
    "reward_std": 0.5,
    "grad_norm": 0.4,
    "groups_without_signal": 1,
}


def test_a_healthy_run_has_no_warnings() -> None:
    assert findings.warnings([train(r, **HEALTHY) for r in range(1, 20)], groups=8) == ()


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"cut": 2}, "cut off by a limit"),
        ({"failed": 2}, "episodes failed"),
        ({"forfeits": 20}, "forfeits per episode"),
        ({"entropy": 0.001}, "stopped exploring"),
        ({"groups_without_signal": 8}, "equal rewards in rounds 1-4"),
        ({"reward_std": 0.001}, "stopped differing"),
        ({"logprob_gap_max": 0.5}, "sampler and trainer differ"),
        ({"grad_norm": math.nan}, "not finite in 4 rounds"),
    ],
)
def test_each_ill_has_its_own_warning(odd: dict[str, Any], says: str) -> None:
    (warning,) = findings.warnings([train(r, **{**HEALTHY, **odd}) for r in range(1, 5)], groups=8)
    assert warning.startswith("ann: ")
    assert says in warning


def test_two_silent_rounds_in_a_row_are_no_warning() -> None:
    silent = [train(r, **{**HEALTHY, "groups_without_signal": 8 if r % 3 else 0}) for r in range(1, 20)]
    assert findings.warnings(silent, groups=8) == ()


def test_no_gradient_in_a_round_without_update_is_no_warning() -> None:
    assert findings.warnings([train(r, **{**HEALTHY, "grad_norm": None}) for r in range(1, 5)], groups=8) == ()
