"""Losses against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from tinker.algorithms import losses
from tinker.algorithms.losses import LOSSES, UnknownLoss, find_loss
from tinker.protocol.values import LossSpec

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")

LOG2 = math.log(2.0)


def terms(
    name: str, *, new: list[float], old: list[float], advantages: list[float], weights: list[float], **spec: float
) -> object:
    """Loss, sums and the gradient by `new`."""
    leaf = torch.tensor(new, requires_grad=True)
    loss, sums = LOSSES[name].terms(leaf, *map(torch.tensor, (old, advantages, weights)), LossSpec(name, **spec))
    loss.backward()
    return loss.item(), {key: value.item() for key, value in sums.items()}, leaf.grad.tolist()


def test_importance_sampling_weighs_the_advantage_by_the_ratio() -> None:
    """Ratios 2 and 1/2, A = 3 and -1, w = 0.5: loss -(0.5*3*2 - 0.5*0.5) = -2.75; the gradient by logprob is each term itself."""
    loss, sums, slope = terms(
        "importance_sampling",
        new=[-1.0, -1.0 - LOG2],
        old=[-1.0 - LOG2, -1.0],
        advantages=[3.0, -1.0],
        weights=[0.5, 0.5],
    )
    assert loss == pytest.approx(-2.75)
    assert slope == pytest.approx([-3.0, 0.25])
    assert sums["ratio_mean"] == pytest.approx(2.5)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    _, _, slope = terms(
        "importance_sampling", new=[-1.0, -2.0], old=[-1.0, -2.0], advantages=[3.0, -1.0], weights=[0.5, 0.25]
    )
    assert slope == pytest.approx([-1.5, 0.25])


def test_ppo_clips_only_where_the_ratio_went_too_far_in_the_paying_direction() -> None:
    """Ratio 2 with A = 1 is cut at 1.3 and has no gradient; with A = -1 it is not cut. Ratio 1/2 mirrors that at 0.9."""
    loss, sums, slope = terms(
        "ppo", new=[LOG2, LOG2, -LOG2, -LOG2], old=[0.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0], weights=[1.0] * 4,
        clip_low=0.1, clip_high=0.3,
    )  # fmt: skip
    assert loss == pytest.approx(-(1.3 - 2.0 + 0.5 - 0.9))
    assert slope == pytest.approx([0.0, 2.0, -0.5, 0.0])
    assert sums["clip_fraction"] == 2.0


def test_ppo_cuts_ratios_off_at_the_cap_which_is_the_dual_clip() -> None:
    """A = -1: ratio 2 is below the cap of 3 and counts whole; ratio 4 counts as 3 and has no gradient. A = 1: the clip was there first.
    Checked against max(min(r A, clip(r) A), cap A) of Ye et al. 2020 for A < 0."""
    ratios, advantages = [2.0, 4.0, 4.0, 0.5], [-1.0, -1.0, 1.0, -1.0]
    loss, sums, slope = terms(
        "ppo", new=[math.log(ratio) for ratio in ratios], old=[0.0] * 4, advantages=advantages, weights=[1.0] * 4, cap=3.0
    )  # fmt: skip
    expected = 0.0
    for ratio, advantage in zip(ratios, advantages, strict=True):
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        expected -= max(surrogate, 3.0 * advantage) if advantage < 0 else surrogate
    assert loss == pytest.approx(expected)
    assert slope == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert (sums["truncated_fraction"], sums["ratio_mean"]) == (2.0, pytest.approx(10.5))
    uncapped, sums, slope = terms("ppo", new=[math.log(4.0)], old=[0.0], advantages=[-1.0], weights=[1.0])
    assert (uncapped, slope) == (pytest.approx(4.0), pytest.approx([4.0]))
    assert "truncated_fraction" not in sums


def test_cross_entropy_looks_at_neither_advantages_nor_old_logprobs() -> None:
    loss, _, slope = terms(
        "cross_entropy", new=[-1.0, -3.0], old=[math.nan] * 2, advantages=[math.nan] * 2, weights=[0.5, 0.25]
    )
    assert loss == pytest.approx(1.25)
    assert slope == [-0.5, -0.25]


def test_the_token_mean_of_the_worked_example_is_the_same_for_both_cuts() -> None:
    """Losses [1] and [2, 2, 2] with weight 1/4: 1.75, in one batch or in two."""
    whole, _, _ = terms(
        "cross_entropy", new=[-1.0, -2.0, -2.0, -2.0], old=[0.0] * 4, advantages=[0.0] * 4, weights=[0.25] * 4
    )
    parts = [
        terms(
            "cross_entropy", new=[-value] * count, old=[0.0] * count, advantages=[0.0] * count, weights=[0.25] * count
        )[0]
        for value, count in ((1.0, 1), (2.0, 3))
    ]
    assert whole == pytest.approx(1.75)
    assert sum(parts) == pytest.approx(1.75)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_a_missing_old_logprob_means_ratio_one_and_keeps_its_gradient(name: str) -> None:
    loss, sums, slope = terms(
        name, new=[-0.1, -0.5, -0.2], old=[-0.1, math.nan, -math.inf], advantages=[1.0] * 3, weights=[1.0] * 3
    )
    assert loss == pytest.approx(-3.0)
    assert sums["ratio_mean"] == pytest.approx(3.0)
    assert slope == pytest.approx([-1.0] * 3)


def test_an_unknown_loss_is_refused_by_the_names_there_are() -> None:
    with pytest.raises(UnknownLoss, match=r"no loss 'gpro'; installed here: cross_entropy, importance_sampling, ppo"):
        find_loss("gpro")


def test_every_loss_says_how_it_fails() -> None:
    for name, loss in LOSSES.items():
        assert find_loss(name) is loss
        assert "Fails" in (getattr(losses, name).__doc__ or "")
