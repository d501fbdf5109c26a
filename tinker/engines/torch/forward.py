"""One forward of the rows that run: their new ids go in behind what is cached of them, logits come out.

`Live` is the batched way (one cache of ours for all rows, any mix of lengths), `Own` the plain one: each row has the cache that
transformers makes for its model, and runs by itself. `generate.Batch` uses either through the same methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinker.engines.torch.cache import LiveCache
from tinker.engines.torch.cutting import right_padded
from tinker.engines.torch.model import Model


class Live(LiveCache):
    """Rows in one cache."""

    def extend(self, begin: int, cached: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        """Append `new` ids to the rows from `begin` on, of which `cached` tokens are there; logits [rows, vocab] after each one's last."""
        model = self._model
        ids = right_padded(new).to(model.device)
        counts = [len(one) for one in new]
        starts = torch.tensor(cached, device=model.device)
        positions = starts[:, None] + torch.arange(ids.shape[1], device=model.device)
        length = max(have + count for have, count in zip(cached, counts, strict=True))
        self.aim(begin, begin + len(new), positions, length)
        unseen = torch.arange(length, device=model.device) > positions[:, :, None]
        mask = torch.zeros(unseen.shape, dtype=model.dtype, device=model.device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, None]
        states = model.hidden(
            ids, attention_mask=mask, position_ids=positions, use_cache=True, **{model.cache_argument: self}
        )
        if ids.shape[1] == 1:
            return model.logits(states[:, 0])
        last = torch.tensor(counts, device=model.device) - 1
        return model.logits(states[torch.arange(len(new), device=model.device), last])


class Own:
    """Rows with a cache each, made by transformers for this model. Nothing of them can be kept, copied or shared."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._caches: dict[int, Any] = {}

    def extend(self, begin: int, cached: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        """The same for one row."""
        from transformers import DynamicCache

        (have,), (ids,) = cached, new
        if not have or begin not in self._caches:
            self._caches[begin] = DynamicCache(config=self._model.causal.config)
        rows = torch.tensor([list(ids)], device=self._model.device)
        states = self._model.hidden(rows, use_cache=True, **{self._model.cache_argument: self._caches[begin]})
        return self._model.logits(states[:, -1])

    def reserve(self, rows: int, length: int) -> None:
        """Caches grow by themselves."""

    def move(self, source: int, target: int, length: int) -> None:
        """The row takes another place."""
        self._caches[target] = self._caches.pop(source)

    def wipe(self, row: int) -> None:
        with contextlib.suppress(KeyError):
            del self._caches[row]

    def copied(self, row: int, length: int) -> Tensor:
        raise NotImplementedError("a cache of the model's own kind is never kept")

    def restore(self, row: int, kept: Tensor, length: int) -> None:
        raise NotImplementedError("a cache of the model's own kind is never kept")
