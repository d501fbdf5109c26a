"""Keys and values of attention: those of the rows running now, and those kept of contexts that may go on.

`LiveCache` is what the model's attention layers write to and read from. Rows running now are its first rows, in order and without holes,
so that a forward reads slices and copies nothing. `KeptContexts` holds what was computed for earlier requests, by cache key. An entry is
valid only for the very weights that made it (the same `owner` object), so a stale version is never read; the least recently used entries
go first when the bound is reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tinker.engines.torch.model import Model

SEARCHED = 64  # kept contexts that are compared with a prompt which has none of its own


class LiveCache:
    """K and V of the running rows: one tensor [layers, 2, rows, kv_heads, length, head_dim] that grows by doubling up to its bounds.

    The last position is a bin: padding writes there, and nobody reads it.
    """

    def __init__(self, model: Model, rows: int) -> None:
        self._model = model
        self._bounds = (rows, model.card.context + 1)
        self._kv = self._blank(min(8, rows), min(128, model.card.context + 1))
        self._read: list[tuple[Tensor, Tensor]] = []
        self._write: list[tuple[Tensor, Tensor]] = []
        self._at: tuple[Tensor | slice, ...] = ()

    def reserve(self, rows: int, length: int) -> None:
        """Make room for this many rows of this many tokens."""
        have = self._kv.shape
        if rows <= have[2] and length < have[4]:
            return
        bigger = self._blank(_doubled(have[2], rows, self._bounds[0]), _doubled(have[4], length + 1, self._bounds[1]))
        bigger[:, :, : have[2], :, : have[4]] = self._kv
        self._kv = bigger

    def aim(self, first: int, last: int, positions: Tensor, length: int) -> None:
        """Say what the next forward is about: rows first..last, their tokens' `positions` [rows, tokens], read up to `length`."""
        part = self._kv[:, :, first:last]
        self._write = [(layer[0], layer[1]) for layer in part]
        self._read = [(layer[0], layer[1]) for layer in part[:, :, :, :, :length]]
        self._at = (
            torch.arange(last - first, device=positions.device)[:, None],
            slice(None),
            positions.clamp_max(self._kv.shape[4] - 1),
        )

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: store new keys and values [rows, kv_heads, tokens, head_dim], return all up to `length`."""
        k, v = self._write[layer]
        k[self._at] = keys.transpose(1, 2)
        v[self._at] = values.transpose(1, 2)
        return self._read[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions are always given, so the model's own count does not matter."""
        return 0

    def copied(self, row: int, length: int) -> Tensor:
        return self._kv[:, :, row, :, :length].clone()

    def restore(self, row: int, kept: Tensor, length: int) -> None:
        self._kv[:, :, row, :, :length] = kept[:, :, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]

    def wipe(self, row: int) -> None:
        """After numbers that were not finite: masked or not, they would spoil the next row that uses this place."""
        self._kv[:, :, row].zero_()

    def _blank(self, rows: int, length: int) -> Tensor:
        model = self._model
        shape = (model.layers, 2, rows, model.kv_heads, length, model.head_dim)
        return torch.zeros(shape, dtype=model.dtype, device=model.device)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """`ids` whose keys and values are `kv` [layers, 2, kv_heads, len(ids), head_dim], computed by `owner`'s weights."""

    owner: object
    ids: list[int]
    kv: Tensor

    @property
    def size(self) -> int:
        return self.kv.numel() * self.kv.element_size()


class KeptContexts:
    """Contexts by cache key, bounded in bytes, least recently used out first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[str, Kept] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def prefix(self, key: str, owner: object, ids: Sequence[int]) -> tuple[int, Tensor | None]:
        """How many leading tokens of `ids` are known under this key and these weights, and their keys and values.

        At most all but the last, because the last one's logits are wanted.
        """
        entry = self._entries.get(key)
        if entry is None:
            return 0, None
        if entry.owner is not owner:
            self._drop(key)
            return 0, None
        shared = min(common_prefix(entry.ids, ids), len(ids) - 1)
        return (shared, entry.kv) if shared else (0, None)

    def longest(self, owner: object, ids: Sequence[int]) -> tuple[int, Tensor | None]:
        """The same, whatever the key: the one of the last used entries that shares most of `ids`. Contexts that begin alike (a group's
        prompt, the instructions of a seat) are computed once."""
        best: tuple[int, Tensor | None] = (0, None)
        for entry in islice(reversed(self._entries.values()), SEARCHED):
            if entry.owner is owner and entry.ids[0] == ids[0]:
                shared = min(common_prefix(entry.ids, ids), len(ids) - 1)
                if shared > best[0]:
                    best = (shared, entry.kv)
        return best

    def keep(self, key: str, entry: Kept) -> None:
        """Put it in place of what the key had, as the most recently used."""
        if key in self._entries:
            self._drop(key)
        if entry.size > self._limit:
            return
        self._entries[key] = entry
        self.bytes += entry.size
        while self.bytes > self._limit:
            self._drop(next(iter(self._entries)))

    def forget(self, key_prefix: str) -> None:
        for key in [key for key in self._entries if key.startswith(key_prefix)]:
            self._drop(key)

    def disown(self, owner: object) -> None:
        """Drop everything these weights made."""
        for key in [key for key, entry in self._entries.items() if entry.owner is owner]:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self.bytes -= self._entries.pop(key).size


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    return next(place for place in range(most) if left[place] != right[place])


def _doubled(have: int, wanted: int, bound: int) -> int:
    while have < wanted:
        have *= 2
    return max(wanted, min(have, bound))
