"""Group-relative advantages: an episode is as good as it is better than the others that began the same way.

    A_i = (r_i - mean(group)) / s        s = std(group)                          scale = "group"  (GRPO)
                                         s = rms of r - mean over the batch      scale = "batch"
                                         s = 1                                   scale = "none"   (Dr. GRPO)

Source: Shao et al. 2024, DeepSeekMath (https://arxiv.org/abs/2402.03300); "none": Liu et al. 2025, Understanding R1-Zero-Like Training
(https://arxiv.org/abs/2503.20783). A group is one agent, one seat, one start: statistics shared between agents give the one with the
smaller rewards only negative advantages (Dr. MAS, https://arxiv.org/abs/2602.08847). The standard deviation of a group is the sample's
(n - 1). The batch's divisor is the root mean square of the centred rewards of one (agent, seat), groups without signal included.

Assumes that the members of a group differ by what was sampled alone: same start, same opponents' versions.
Fails when groups are all equal (no gradient at all: use more members, a finer reward, or `reinforce`). "group" makes groups that almost
agree count as much as those that disagree; "batch" lets one group with huge rewards drown the others; "none" leaves the step size to the
scale of the reward. Spreads that are rounding noise count as equal, else they would be blown up to full-size advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tinker.algorithms.credit import Sample, centred, grouped

Scale = Literal["group", "batch", "none"]


class Grpo:
    """See the module. It keeps no state."""

    name = "grpo"

    def __init__(self, scale: Scale = "group") -> None:
        if scale not in get_args(Scale):
            raise ValueError(f"grpo has no scale {scale!r}; choose one of {', '.join(get_args(Scale))}")
        self._scale = scale

    def advantages(self, samples: Sequence[Sample]) -> list[float | None]:
        found: list[float | None] = [None] * len(samples)
        centres = [(group, centred([samples[position] for position in group])) for group in grouped(samples)]
        shared = self._shared_divisors(samples, centres)
        for group, centre in centres:
            first = samples[group[0]]
            divisor = shared[first.agent, first.seat] if self._scale == "batch" else self._divisor(centre)
            for position, value in zip(group, centre / divisor, strict=True):
                found[position] = float(value)
        return found

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def _divisor(self, centre: npt.NDArray[np.float64]) -> float:
        if self._scale == "none" or not centre.any():
            return 1.0
        return float(np.sqrt((centre**2).sum() / (centre.size - 1)))

    @staticmethod
    def _shared_divisors(
        samples: Sequence[Sample], centres: Sequence[tuple[list[int], npt.NDArray[np.float64]]]
    ) -> dict[tuple[str, str], float]:
        together: dict[tuple[str, str], list[npt.NDArray[np.float64]]] = {}
        for group, centre in centres:
            first = samples[group[0]]
            together.setdefault((first.agent, first.seat), []).append(centre)
        spreads = {key: float(np.sqrt((np.concatenate(parts) ** 2).mean())) for key, parts in together.items()}
        return {key: spread or 1.0 for key, spread in spreads.items()}
