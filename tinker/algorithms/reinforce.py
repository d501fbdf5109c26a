"""REINFORCE with a running baseline per (agent, seat): how much better was this episode than what this seat usually gets?

    A_i = r_i - b[agent, seat],   then   b <- decay * b + (1 - decay) * r_i        (b starts at 0; samples in the order given)

Source: Williams 1992; the baseline per role is role-conditioned advantage estimation of SPIRAL (Liu et al. 2025,
https://arxiv.org/abs/2506.24119), made for zero-sum self-play where the first player's usual score is not the second's.

Assumes that scores of one seat are comparable across starts and drift slowly. Needs no groups: every episode may have a start of its own.
Fails when starts differ much in difficulty (the luck of the start is credited to the play: use `grpo`), and early on, while the baseline
is still near 0 (about 1 / (1 - decay) samples). The advantage is taken against the baseline as it was before this sample, else a sample
would pull its own yardstick. Advantages are not scaled: the step size follows the scale of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinker.algorithms.credit import Sample, is_good


class Reinforce:
    """See the module."""

    name = "reinforce"

    def __init__(self, decay: float = 0.95) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(
                f"reinforce has decay {decay}; expected 0 <= decay < 1 (0: the previous score is the baseline)"
            )
        self._decay = decay
        self._baselines: dict[tuple[str, str], float] = {}

    def advantages(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._advantage(sample) for sample in samples]

    def state(self) -> dict[str, Any]:
        """{"baselines": [[agent, seat, value], ...]} in alphabetical order."""
        return {"baselines": [[agent, seat, value] for (agent, seat), value in sorted(self._baselines.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._baselines = {(str(agent), str(seat)): float(value) for agent, seat, value in state["baselines"]}

    def _advantage(self, sample: Sample) -> float | None:
        if sample.score is None or not is_good(sample.score):
            return None
        key = (sample.agent, sample.seat)
        before = self._baselines.get(key, 0.0)
        self._baselines[key] = self._decay * before + (1.0 - self._decay) * sample.score
        return sample.score - before
