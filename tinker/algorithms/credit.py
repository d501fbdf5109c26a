"""What an algorithm is given and gives back: scores of an agent's sequences in, advantages out.

Statistics never mix agents or seats: the proposer of a game and its responder have different odds, so a baseline shared between them
would praise one for the other's luck. The key of everything here is (agent, seat), and within it the group: episodes that share a start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

RELATIVE_NOISE = 1e-6  # spreads below this share of the largest score, or
ABSOLUTE_NOISE = 1e-9  # below this, are rounding and not signal


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to be credited. Scores that are None, NaN or infinite are bad: nothing is learned from that sequence."""

    agent: str
    seat: str
    group: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Signal:
    """How much there was to learn from. `no_signal` groups have equal scores (groups of one included, and counted as `singletons`)."""

    groups: int
    no_signal: int
    singletons: int
    bad_scores: int


class Algorithm(Protocol):
    """Turns scores into advantages. Its state is plain data (JSON) and commits together with the update it belongs to."""

    @property
    def name(self) -> str: ...

    def advantages(self, samples: Sequence[Sample]) -> list[float | None]:
        """One advantage per sample, None exactly where the score is bad. Always finite. The order of samples may matter: sort them."""

    def state(self) -> dict[str, Any]:
        """Everything `restore` needs to go on as if nothing had happened."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the own state."""


def is_good(score: float | None) -> bool:
    """Whether anything can be learned from this score."""
    return score is not None and math.isfinite(score)


def grouped(samples: Sequence[Sample]) -> list[list[int]]:
    """Positions of the samples with good scores, per (agent, seat, group), in order of first appearance."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for position, sample in enumerate(samples):
        if is_good(sample.score):
            groups.setdefault((sample.agent, sample.seat, sample.group), []).append(position)
    return list(groups.values())


def centred(group: Sequence[Sample]) -> npt.NDArray[np.float64]:
    """Scores minus their mean; all zero if they are equal up to rounding, or if there is only one. ValueError if the group mixes agents
    or seats, or holds a bad score."""
    keys = {(sample.agent, sample.seat) for sample in group}
    if len(keys) > 1:
        mixed = ", ".join(f"{agent} at {seat}" for agent, seat in sorted(keys))
        raise ValueError(
            f"one group mixes {mixed}; scores are compared within one agent and seat only: group them apart"
        )
    if not all(is_good(sample.score) for sample in group):
        raise ValueError("a group holds a score that is None, NaN or infinite; leave such samples out")
    scores = np.array([sample.score for sample in group], np.float64)
    if not has_signal(scores):
        return np.zeros_like(scores)
    return np.asarray(scores - scores.mean(), np.float64)


def has_signal(scores: npt.NDArray[np.float64]) -> bool:
    """Whether the scores differ by more than rounding."""
    if scores.size < 2:
        return False
    largest = float(np.abs(scores).max())
    return float(scores.max() - scores.min()) > ABSOLUTE_NOISE + RELATIVE_NOISE * largest


def signal_in(samples: Sequence[Sample]) -> Signal:
    """Count what there is to learn from; groups in which every score is bad are no groups."""
    scores = [np.array([samples[position].score for position in group], np.float64) for group in grouped(samples)]
    return Signal(
        groups=len(scores),
        no_signal=sum(not has_signal(group) for group in scores),
        singletons=sum(group.size == 1 for group in scores),
        bad_scores=sum(not is_good(sample.score) for sample in samples),
    )


def along(mask: npt.NDArray[np.bool_], advantage: float, discount: float = 1.0) -> npt.NDArray[np.float32]:
    """A terminal reward's credit on every trained token of a row: the last one gets `advantage`, the one before `discount` times that.

    Only trained tokens are steps. Prompts, observations and other seats' words between them discount nothing (with a value of 0
    everywhere this is generalised advantage estimation with gamma * lambda = discount, over the own tokens alone).
    """
    steps = np.flatnonzero(mask)
    credit = np.zeros(mask.shape, np.float32)
    credit[steps] = advantage * np.power(discount, np.arange(steps.size - 1, -1, -1, dtype=np.float64))
    return credit
