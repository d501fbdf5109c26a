"""Cutting rows of different lengths into right-padded batches that are neither too big nor mostly padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PADDED_TOKENS = 2048  # enough to keep the processor busy, small enough for its caches


def cut(lengths: Sequence[int], padded: int = PADDED_TOKENS) -> list[list[int]]:
    """Indices of the rows of each batch, longest rows first; every index exactly once.

    A batch holds at most `padded` tokens, padding included, and at most an eighth of that in padding; a longer row goes alone.
    """
    batches: list[list[int]] = []
    waste = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        width = lengths[batches[-1][0]] if batches else 0
        waste += width - lengths[index]
        if not batches or width * (len(batches[-1]) + 1) > padded or waste * 8 > padded:
            batches.append([])
            waste = 0
        batches[-1].append(index)
    return batches


def right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[rows, longest] int64, filled up with id 0."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
