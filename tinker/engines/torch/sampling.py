"""One token per row, all rows at once, and the exact logprob of each.

A sampled token depends on its row's logits, temperature and one uniform number only, never on the company: it is the inverse of the
row's cumulative distribution at that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """What rows want, as tensors: `inverse` [rows, 1] of the temperatures (None: all 1), `greedy` [rows] (None: none of them)."""

    inverse: Tensor | None
    greedy: Tensor | None
    all_greedy: bool


def plan(temperatures: Sequence[float], device: torch.device | None = None) -> Plan:
    """Temperature 0 is greedy; its logprobs are those of temperature 1. `device`: where the logits will be."""
    scales = [1.0 / temperature if temperature > 0.0 else 1.0 for temperature in temperatures]
    greedy = [temperature <= 0.0 for temperature in temperatures]
    return Plan(
        inverse=None if all(scale == 1.0 for scale in scales) else torch.tensor(scales, device=device)[:, None],
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        all_greedy=all(greedy),
    )


def sample(logits: Tensor, wanted: Plan, uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One id per row of `logits` [rows, vocab], and its logprob. `uniforms` lie in (0, 1], one per row."""
    scaled = logits if wanted.inverse is None else logits * wanted.inverse
    logprobs = torch.log_softmax(scaled, dim=-1)
    if wanted.all_greedy:
        chosen = logprobs.argmax(dim=-1, keepdim=True)
    else:
        summed = logprobs.exp().cumsum(dim=-1)
        sought = torch.tensor(uniforms, dtype=summed.dtype, device=summed.device)[:, None] * summed[:, -1:]
        chosen = torch.searchsorted(summed, sought).clamp_max(logits.shape[-1] - 1)
        if wanted.greedy is not None:
            chosen = torch.where(wanted.greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), chosen)
    ids: list[int] = chosen.squeeze(1).tolist()
    values: list[float] = logprobs.gather(1, chosen).squeeze(1).tolist()
    return ids, values


def sample_alone(logits: Tensor, wanted: Plan, uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """The same, row by row: to the last bit what each row gets in a batch of its own."""
    ids: list[int] = []
    values: list[float] = []
    for row, uniform in enumerate(uniforms):
        one = Plan(
            None if wanted.inverse is None else wanted.inverse[row : row + 1],
            None if wanted.greedy is None else wanted.greedy[row : row + 1],
            wanted.all_greedy,
        )
        chosen, logprob = sample(logits[row : row + 1], one, [uniform])
        ids += chosen
        values += logprob
    return ids, values
