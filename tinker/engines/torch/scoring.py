"""Logits exactly where they are wanted: rows right-padded into one forward, the output layer at the chosen positions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinker.engines.checks import check_rows
from tinker.engines.torch.cutting import cut
from tinker.engines.torch.lora import Use
from tinker.engines.torch.model import Model
from tinker.protocol.batches import Row

LOGITS = 2**27  # a forward makes at most this many logits, unless one row alone makes more


@dataclass(frozen=True, slots=True)
class Picked:
    """A batch of rows and n chosen tokens in it. `ids` [rows, tokens]; `before` [n] is the flat place of each chosen token's predecessor,
    `tokens` [n] the chosen tokens, `temperature` [n, 1] their rows' (None: all 1)."""

    ids: Tensor
    before: Tensor
    tokens: Tensor
    temperature: Tensor | None

    def logits(self, model: Model, use: Use | None) -> Tensor:
        """[n, vocab], divided by the temperature. Padding is on the right, so plain causal attention never sees it."""
        model.router.use = use
        where = model.device
        states = model.hidden(self.ids.to(where), use_cache=False)
        logits = model.logits(states.reshape(-1, states.shape[-1]).index_select(0, self.before.to(where)))
        return logits if self.temperature is None else logits / self.temperature.to(where)


def pick(rows: Sequence[Row], chosen: Sequence[npt.NDArray[np.intp]], *, tempered: bool = True) -> Picked:
    """`chosen` holds per row the positions t >= 1 whose tokens are wanted."""
    width = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row.ids)] = row.ids
    flat = np.concatenate([where + number * width for number, where in enumerate(chosen)])
    heat = [row.temperature if row.temperature > 0.0 and tempered else 1.0 for row in rows]
    temperature = None
    if any(value != 1.0 for value in heat):
        temperature = torch.from_numpy(np.repeat(np.array(heat, np.float32), [len(where) for where in chosen]))[:, None]
    return Picked(
        torch.from_numpy(ids), torch.from_numpy(flat - 1), torch.from_numpy(ids.reshape(-1)[flat]), temperature
    )


def cut_rows(rows: Sequence[Row], vocab: int, padded: int) -> list[list[int]]:
    """Indices of the rows of each forward: at most `padded` tokens in one, fewer where the vocabulary is large."""
    return cut([len(row.ids) for row in rows], max(1, min(padded, LOGITS // vocab)))


@torch.no_grad()
def score(model: Model, use: Use | None, rows: Sequence[Row], padded: int) -> list[list[float]]:
    """Per row the logprob of each token t >= 1 at the row's temperature; 0.0 at t = 0."""
    check_rows(rows, model.card)
    scored: list[list[float]] = [[0.0] * min(len(row.ids), 1) for row in rows]
    long = [number for number, row in enumerate(rows) if len(row.ids) > 1]
    for batch in cut_rows([rows[number] for number in long], model.card.vocab, padded):
        numbers = [long[place] for place in batch]
        counts = [len(rows[number].ids) - 1 for number in numbers]
        picked = pick([rows[number] for number in numbers], [np.arange(1, count + 1) for count in counts])
        logprobs = (
            torch.log_softmax(picked.logits(model, use), dim=-1)
            .gather(1, picked.tokens[:, None].to(model.device))
            .squeeze(1)
        )
        for number, values in zip(numbers, torch.split(logprobs, counts), strict=True):
            scored[number] += values.tolist()
    return scored
