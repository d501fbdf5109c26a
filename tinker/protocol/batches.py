"""Training rows, and how a batch of them travels: one safetensors file of concatenated arrays.

A row is one (episode, seat) context of one agent, or one prompt/answer pair in supervised fine-tuning. All per-token arrays have the
row's length T; position t describes token t. `mask[t]` is 1 exactly where the agent's own sampled token is trained on; `logprobs[t]` is
what it had when sampled, `advantages[t]` its credit, `weights[t]` what it counts in the loss's sum (1 / number of rows, or 1 / number
of trained tokens: the learner decides, so that the cut into micro-batches changes nothing). All three are 0 where the mask is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

FILE = "batch.safetensors"


@dataclass(frozen=True, slots=True)
class Row:
    """ids int32[T], mask bool[T], logprobs/advantages/weights float32[T]; `temperature` is the sampler's."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mask", "logprobs", "advantages", "weights"):
            if getattr(self, name).shape != self.ids.shape:
                raise ValueError(f"row has {self.ids.shape[0]} ids but {getattr(self, name).shape[0]} {name}")


def encode_rows(rows: Sequence[Row]) -> bytes:
    """The rows as one safetensors file."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": _joined([row.ids for row in rows], np.int32),
        "mask": _joined([row.mask for row in rows], np.uint8),
        "logprobs": _joined([row.logprobs for row in rows], np.float32),
        "advantages": _joined([row.advantages for row in rows], np.float32),
        "weights": _joined([row.weights for row in rows], np.float32),
        "lengths": np.array([row.ids.shape[0] for row in rows], np.int64),
        "temperatures": np.array([row.temperature for row in rows], np.float64),
    }
    return bytes(save(arrays))


def decode_rows(data: bytes) -> list[Row]:
    """The inverse of `encode_rows`."""
    arrays = load(data)
    ends = np.cumsum(arrays["lengths"])
    rows = []
    for end, length, temperature in zip(ends, arrays["lengths"], arrays["temperatures"], strict=True):
        span = slice(int(end - length), int(end))
        rows.append(
            Row(
                ids=arrays["ids"][span],
                mask=arrays["mask"][span].astype(np.bool_),
                logprobs=arrays["logprobs"][span],
                advantages=arrays["advantages"][span],
                weights=arrays["weights"][span],
                temperature=float(temperature),
            )
        )
    return rows


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)
