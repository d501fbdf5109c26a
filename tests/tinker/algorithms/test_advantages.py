"""Advantages against worked numbers (field cases H1 to H5, H11, H12)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker.algorithms.credit import Algorithm, Sample, along, centred, signal_in
from tinker.algorithms.grpo import Grpo, Scale
from tinker.algorithms.registry import ALGORITHMS, make_algorithm
from tinker.algorithms.reinforce import Reinforce


def group(scores: Sequence[float | None], number: int = 0, agent: str = "x", seat: str = "left") -> list[Sample]:
    return [Sample(agent, seat, number, score) for score in scores]


def test_h1_a_group_of_four_is_centred_and_scaled_by_its_sample_deviation() -> None:
    assert Grpo("group").advantages(group([1, 0, 0, 1])) == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)


def test_h1_groups_of_one_give_nothing_and_are_counted() -> None:
    samples = [Sample("x", "left", number, score) for number, score in enumerate([1.0, 0.0, 0.0, 1.0])]
    assert Grpo().advantages(samples) == [0.0] * 4
    assert (signal_in(samples).singletons, signal_in(samples).no_signal) == (4, 4)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_h2_agents_with_other_reward_scales_do_not_touch_each_other(scale: Scale) -> None:
    samples = [
        one for pair in zip(group([0, 1, 0, 1]), group([10, 20, 10, 20], agent="y"), strict=True) for one in pair
    ]
    expected = 0.866 if scale == "group" else 1.0
    found = Grpo(scale).advantages(samples)
    assert found[0::2] == pytest.approx([-expected, expected] * 2, abs=1e-3)
    assert found[1::2] == pytest.approx([-expected, expected] * 2, abs=1e-3)


def test_h2_seats_of_one_agent_are_groups_of_their_own() -> None:
    found = Grpo().advantages(group([0, 1], seat="left") + group([10, 20], seat="right"))
    assert found == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-3)


def test_h2_a_group_that_mixes_agents_or_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="mixes x at left, y at left"):
        centred(group([0, 1]) + group([10], agent="y"))
    with pytest.raises(ValueError, match="mixes x at left, x at right"):
        centred(group([0, 1]) + group([10], seat="right"))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_h3_groups_without_signal_give_zero_and_are_counted(scale: Scale) -> None:
    samples = (
        group([1, 1, 1, 1], 0)
        + group([0], 1)
        + group([0.1, 0.1, 0.1, 0.1 + 1e-9], 2)
        + group([0.1 + 0.2 - 0.3, 0.0], 3)
    )
    assert Grpo(scale).advantages(samples) == [0.0] * 11
    assert (signal_in(samples).groups, signal_in(samples).no_signal, signal_in(samples).singletons) == (4, 4, 1)


def test_small_rewards_are_signal() -> None:
    assert Grpo().advantages(group([0.0, 1e-6])) == pytest.approx([-0.7071, 0.7071], abs=1e-3)


def test_h4_every_group_has_its_own_mean_and_deviation() -> None:
    samples = group([1, 0, 0, 0], 0) + group([5, 5, 5, 9], 1)
    assert Grpo("group").advantages(samples) == pytest.approx([1.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 1.5])


def test_h4_with_a_shared_divisor_the_mean_is_still_the_group_s() -> None:
    samples = group([1, 0, 0, 0], 0) + group([5, 5, 5, 9], 1)
    centres = np.array([0.75, -0.25, -0.25, -0.25, -1, -1, -1, 3])
    assert Grpo("batch").advantages(samples) == pytest.approx(list(centres / math.sqrt((centres**2).mean())))
    assert Grpo("none").advantages(samples) == pytest.approx(list(centres))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["l", "r"]), st.integers(-3, 3)), max_size=20),
    st.randoms(),
    st.sampled_from(["group", "batch", "none"]),
)
def test_h4_the_order_of_samples_does_not_matter_to_groups(
    rows: list[tuple[int, str, int]], rng: random.Random, scale: Scale
) -> None:
    samples = [Sample("x", seat, number, float(score)) for number, seat, score in rows]
    order = list(range(len(samples)))
    rng.shuffle(order)
    expected = Grpo(scale).advantages(samples)
    found = Grpo(scale).advantages([samples[at] for at in order])
    assert found == pytest.approx([expected[at] for at in order])


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_h5_a_bad_score_masks_its_own_sample_and_nothing_else(bad: float | None) -> None:
    samples = group([1, bad, 0, 1], 0) + group([1, 0, 0, 1], 1)
    found = Grpo().advantages(samples)
    assert found[1] is None
    assert [found[0], found[2], found[3]] == pytest.approx([0.577, -1.155, 0.577], abs=1e-3)
    assert found[4:] == Grpo().advantages(group([1, 0, 0, 1]))
    assert signal_in(samples).bad_scores == 1


def test_h5_a_bad_score_leaves_the_running_baseline_alone() -> None:
    assert Reinforce().advantages(group([1, math.nan, None, -1])) == [1.0, None, None, pytest.approx(-1.05)]


def test_h11_only_own_tokens_are_steps_of_the_discount() -> None:
    mask = np.array([1, 0, 0, 1, 1, 0, 0], np.bool_)
    assert along(mask, 1.0, 0.9 * 0.9) == pytest.approx([0.6561, 0, 0, 0.81, 1.0, 0, 0])
    assert along(mask, 1.0, 0.0) == pytest.approx([0, 0, 0, 0, 1.0, 0, 0])
    assert along(mask, 2.0) == pytest.approx([2, 0, 0, 2, 2, 0, 0])
    assert not along(np.zeros(3, np.bool_), 1.0).any()


ROLES = [
    Sample("x", seat, number, score)
    for number, score in enumerate([1.0, -1.0, 1.0])
    for seat, score in (("p", score), ("q", -score))
]


def test_h12_a_score_is_judged_by_the_baseline_before_it() -> None:
    found = Reinforce(0.95).advantages(ROLES)
    assert found[0::2] == pytest.approx([1.0, -1.05, 1.0025])
    assert found[1::2] == pytest.approx([-1.0, 1.05, -1.0025])


def test_h12_a_restored_baseline_goes_on_with_the_same_numbers() -> None:
    first = Reinforce()
    before = first.advantages(ROLES[:2])
    second = Reinforce()
    second.restore(json.loads(json.dumps(first.state())))
    assert before + second.advantages(ROLES[2:]) == Reinforce().advantages(ROLES)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.floats(-1e6, 1e6) | st.just(math.nan)), max_size=12))
def test_every_algorithm_gives_a_finite_number_for_every_good_score(
    name: str, rows: list[tuple[int, float | None]]
) -> None:
    algorithm: Algorithm = make_algorithm(name)
    samples = [Sample("x", "left", number, score) for number, score in rows]
    found = algorithm.advantages(samples)
    assert [value is None for value in found] == [score is None or math.isnan(score) for _, score in rows]
    assert all(math.isfinite(value) for value in found if value is not None)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_s_state_is_plain_data(name: str) -> None:
    algorithm = make_algorithm(name)
    algorithm.advantages(ROLES)
    again = make_algorithm(name)
    again.restore(json.loads(json.dumps(algorithm.state())))
    assert again.state() == algorithm.state()
    assert again.advantages(ROLES) == algorithm.advantages(ROLES)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="no algorithm 'ppo'; choose one of grpo, reinforce"):
        make_algorithm("ppo")
    with pytest.raises(ValueError, match=r"does not take the options \['decay'\]"):
        make_algorithm("grpo", decay=0.9)
    with pytest.raises(ValueError, match="no scale 'std'; choose one of group, batch, none"):
        make_algorithm("grpo", scale="std")
    with pytest.raises(ValueError, match=r"decay 1\.0"):
        make_algorithm("reinforce", decay=1.0)
