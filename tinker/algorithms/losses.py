"""Losses by name: from logprobs, advantages and weights to one sum.

A loss is a small pure function over the trained tokens of a batch. It sees four vectors of one length: `new` (logprobs under the weights
being trained, with gradient), `old` (as sampled), `advantages`, `weights`; and the `LossSpec`. It returns the *sum* over tokens, never a
mean: `weights` already hold the denominators, so that the cut into micro-batches changes nothing. The scorer divides logits by the
sampler's temperature before `new` is taken, except for losses with `tempered=False`, which always see temperature 1.

A package adds its own through the entry-point group `opentinker.losses` (name -> `Loss`); nothing is ever uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from tinker.protocol.values import LossSpec

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "opentinker.losses"


class UnknownLoss(Exception):
    """No loss of that name is installed here."""


@dataclass(frozen=True, slots=True)
class Loss:
    """`terms` gives the loss sum and, by name, sums over tokens of what should be reported as a mean.

    `by_advantage`: the gradient of a token with advantage 0 is exactly zero, so that it may be left out. `tempered`: see the module.
    """

    terms: Callable[[Tensor, Tensor, Tensor, Tensor, LossSpec], tuple[Tensor, dict[str, Tensor]]]
    by_advantage: bool = True
    tempered: bool = True


def importance_sampling(
    new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, spec: LossSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with an importance weight: loss = -sum w * A * exp(new - old).

    On-policy (new == old) its gradient is REINFORCE's, -sum w * A * grad new (Williams 1992); off-policy by a little, the ratio corrects
    each token for having been sampled by older weights. Assumes advantages that do not depend on the token they credit. Fails by
    variance: nothing bounds the ratio, so a batch far off-policy makes steps as large as its largest ratio; use `ppo` there.
    """
    ratio = (new - known(old, new)).exp()
    return -(weights * advantages * ratio).sum(), {"ratio_mean": ratio.detach().sum()}


def ppo(
    new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, spec: LossSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate: loss = -sum w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), r = min(exp(new - old), cap).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; separate bounds as in Yu et al. 2025 (DAPO, "clip-higher"). `old` are
    the sampler's own logprobs, so that r corrects for everything in which sampling was different from training: older weights first of
    all. The clip bounds r from above where A > 0 only; where A < 0 a token that has become likely since it was sampled would move the
    weights without limit. There the cap holds (0: none): ratios are truncated (Ionides 2008, "Truncated Importance Sampling"), which for a
    clipped surrogate is the dual clip of Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning"
    (max(min(r A, clip(r) A), cap A) for A < 0). A token beyond the cap has no gradient.

    Assumes several steps on one batch, or a sampler that is a little behind. Fails quietly: with one step per fresh batch every ratio is 1
    and it is `importance_sampling`; once most ratios are outside the bounds (see clip_fraction and truncated_fraction) most of the batch
    teaches nothing.
    """
    ratio = (new - known(old, new)).exp()
    free = ratio.detach()
    if spec.cap:
        ratio = ratio.clamp(max=spec.cap)
    clipped = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    loss = -(weights * (ratio * advantages).minimum(clipped * advantages)).sum()
    cut = (clipped * advantages < ratio * advantages).detach().float()
    metrics = {"ratio_mean": free.sum(), "clip_fraction": cut.sum()}
    if spec.cap:
        metrics["truncated_fraction"] = (free > spec.cap).float().sum()
    return loss, metrics


def cross_entropy(
    new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, spec: LossSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning: loss = -sum w * new, always at temperature 1; `old` and `advantages` are not looked at.

    Maximum likelihood of the shown tokens. Assumes that every unmasked token is worth imitating. Fails by forgetting: with few examples
    it drives their probability to 1 and everything else's to 0.
    """
    return -(weights * new).sum(), {"ratio_mean": new.detach().new_tensor(float(new.numel()))}


LOSSES: Mapping[str, Loss] = {
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo),
    "cross_entropy": Loss(cross_entropy, by_advantage=False, tempered=False),
}


def known(old: Tensor, new: Tensor) -> Tensor:
    """`old`, and where the sampler gave no finite value, `new` without gradient: the ratio is 1 there."""
    return old.where(old.isfinite(), new.detach())


def find_loss(name: str) -> Loss:
    """The loss of that name: built in, or installed by a package. UnknownLoss tells which there are."""
    if name in LOSSES:
        return LOSSES[name]
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        there = ", ".join(sorted([*LOSSES, *installed]))
        raise UnknownLoss(
            f"there is no loss {name!r}; installed here: {there}. Install a package that offers it under {GROUP}"
        )
    found = installed[name].load()
    if not isinstance(found, Loss):
        raise UnknownLoss(
            f"{installed[name].value} offers loss {name!r} but is a {type(found).__name__}, not a tinker.algorithms.losses.Loss"
        )
    return found
