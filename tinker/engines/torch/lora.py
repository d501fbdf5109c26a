"""LoRA for many adapters at once: one forward, and each row of the batch goes through its own adapter or through none.

Every adaptable linear layer of the base model (a *site*) is replaced by a `LoraLinear` that shares its weight. What a forward does with
adapters is said once, before it, by setting `Router.use`: `None` (base), `One` (all rows the same adapter; also the path that trains),
or `Mixed` (rows differ). Adapter tensors are never changed here: the scale is applied to the activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = 64  # up to this many stacked rank columns one dense product is cheaper than gathering per row


@dataclass(frozen=True, slots=True)
class Site:
    """One adaptable linear layer. `path` is its name in the model, `leaf` the last part of it (what `targets` names)."""

    path: str
    leaf: str
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter: per site `down` [rank, inputs] and `up` [outputs, rank] (PEFT's A and B), or None where it adapts nothing.

    Two adapters are the same only if they are the same object.
    """

    rank: int
    alpha: float
    down: tuple[Tensor | None, ...]
    up: tuple[Tensor | None, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Use(Protocol):
    """Adds the adapters' share to one site's output."""

    def added(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        """`x` [rows, tokens, inputs] is the site's input, `y` [rows, tokens, outputs] the base layer's output."""


class Router:
    """Holds what the next forward does with adapters, and the last stack it needed."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = tuple(sites)
        self.use: Use | None = None
        self._stack: Stack | None = None

    def rows(self, adapters: Sequence[Adapter | None]) -> Use | None:
        """How to run rows with these adapters."""
        distinct = dict.fromkeys(adapters)
        if len(distinct) == 1:
            only = adapters[0]
            return None if only is None else One(only)
        needed = [adapter for adapter in distinct if adapter is not None]
        stack = self._stack
        if stack is None or len(stack.adapters) > 4 * len(needed) or any(a not in stack.places for a in needed):
            stack = self._stack = Stack(needed, self.sites)
        return Mixed(stack, adapters)

    def dropped(self, adapter: Adapter) -> None:
        """Let go of copies of this adapter."""
        if self._stack is not None and adapter in self._stack.places:
            self._stack = None


class LoraLinear(nn.Module):
    """A frozen linear layer plus whatever adapters the router names."""

    def __init__(self, linear: nn.Linear, site: int, router: Router) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.site = site
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        use = self.router.use
        return y if use is None else use.added(self.site, x, y)


class One:
    """All rows through one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._down, self._up, self._scale = adapter.down, adapter.up, adapter.scale

    def added(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        down, up = self._down[site], self._up[site]
        if down is None or up is None:
            return y
        low = torch.mm(x.reshape(-1, x.shape[-1]), down.t())
        return torch.addmm(y.reshape(-1, y.shape[-1]), low, up.t(), alpha=self._scale).view(y.shape)


class Stack:
    """Several adapters side by side: per site `down` [n, rank, inputs] and `up` [n, rank, outputs], smaller ranks filled with zeros."""

    def __init__(self, adapters: Sequence[Adapter], sites: Sequence[Site]) -> None:
        self.adapters = tuple(adapters)
        self.places = {adapter: place for place, adapter in enumerate(adapters)}
        self.rank = max(adapter.rank for adapter in adapters)
        self.down: list[Tensor] = []
        self.up: list[Tensor] = []
        for index, site in enumerate(sites):
            down = torch.zeros(len(adapters), self.rank, site.inputs)
            up = torch.zeros(len(adapters), self.rank, site.outputs)
            for place, adapter in enumerate(adapters):
                a, b = adapter.down[index], adapter.up[index]
                if a is not None and b is not None:
                    down[place, : adapter.rank] = a
                    up[place, : adapter.rank] = b.t()
            self.down.append(down)
            self.up.append(up)


class Mixed:
    """Rows through different adapters (or none), in one of two ways that compute the same sum.

    Few columns: one dense product with all adapters, and every column that is not the row's own multiplied by zero. Many: the row's own
    matrices gathered once for this set of rows, then batched products.
    """

    def __init__(self, stack: Stack, adapters: Sequence[Adapter | None]) -> None:
        self._stack = stack
        own = [-1 if adapter is None else stack.places[adapter] for adapter in adapters]
        scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
        rank, width = stack.rank, len(stack.adapters) * stack.rank
        self._columns: Tensor | None = None
        if width <= WIDE:
            columns = torch.zeros(len(own), len(stack.adapters), rank)
            columns[torch.arange(len(own)), own] = torch.tensor(scales)[:, None]
            self._columns = columns.view(len(own), 1, width)
            return
        self._index = torch.tensor(own).clamp_min(0)
        self._scales = torch.tensor(scales).view(-1, 1, 1)
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}

    def added(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        if self._columns is None:
            return self._added_by_row(site, x, y)
        down, up = self._stack.down[site], self._stack.up[site]
        width = self._columns.shape[-1]
        low = torch.mm(x.reshape(-1, x.shape[-1]), down.view(width, -1).t()).view(*x.shape[:2], width) * self._columns
        return torch.addmm(y.view(-1, y.shape[-1]), low.view(-1, width), up.view(width, -1)).view(y.shape)

    def _added_by_row(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        pair = self._gathered.get(site)
        if pair is None:
            down = self._stack.down[site].index_select(0, self._index).transpose(1, 2)
            pair = self._gathered[site] = (down, self._stack.up[site].index_select(0, self._index) * self._scales)
        return torch.baddbmm(y, torch.bmm(x, pair[0]), pair[1])


def fresh(
    rank: int, alpha: float, chosen: Sequence[bool], sites: Sequence[Site], seed: int
) -> list[tuple[Tensor, Tensor] | None]:
    """New adapter values per site: A uniform in +-1/sqrt(inputs) (PEFT's Kaiming initialisation), B zero, so that nothing changes yet."""
    noise = torch.Generator().manual_seed(seed)
    made: list[tuple[Tensor, Tensor] | None] = []
    for site, wanted in zip(sites, chosen, strict=True):
        if not wanted:
            made.append(None)
            continue
        bound = 1.0 / math.sqrt(site.inputs)
        made.append(
            (torch.empty(rank, site.inputs).uniform_(-bound, bound, generator=noise), torch.zeros(site.outputs, rank))
        )
    return made
