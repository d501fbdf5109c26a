"""LoRA for many adapters at once: one forward, and each row of the batch goes through its own adapter or through none.

Every adaptable linear layer of the base model (a *site*) is replaced by a `LoraLinear` that shares its weight. What a forward does with
adapters is said once, before it, by setting `Router.use`: `None` (base), `One` (all rows the same adapter; also the path that trains),
or `Dense` or `Grouped` (rows differ). Adapter tensors are never changed here: the scale goes into copies or activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tinker.engines.torch.packed import FrozenLinear

WIDE = 64  # up to this many stacked rank columns one dense product is cheaper than a batched one


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

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        """The same where and as the model computes."""
        down, up = (
            tuple(None if each is None else each.to(device, dtype) for each in side) for side in (self.down, self.up)
        )
        return Adapter(self.rank, self.alpha, down, up)


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
        if stack is None or len(stack.adapters) > 2 * len(needed) or any(a not in stack.places for a in needed):
            stack = self._stack = Stack(needed, self.sites)
        return mixed(stack, adapters)

    def dropped(self, adapter: Adapter) -> None:
        """Let go of copies of this adapter."""
        if self._stack is not None and adapter in self._stack.places:
            self._stack = None


class LoraLinear(FrozenLinear):
    """A frozen linear layer plus whatever adapters the router names."""

    def __init__(self, linear: nn.Linear, site: int, router: Router) -> None:
        super().__init__(linear)
        self.site = site
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
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
        low = torch.mm(x.reshape(-1, x.shape[-1]), down.t().to(x.dtype))
        return torch.addmm(y.reshape(-1, y.shape[-1]), low, up.t().to(x.dtype), alpha=self._scale).view(y.shape)


class Stack:
    """Several adapters side by side: per site `down` [n, rank, inputs] and `up` [n, rank, outputs] with the scale in it, smaller ranks
    filled with zeros."""

    def __init__(self, adapters: Sequence[Adapter], sites: Sequence[Site]) -> None:
        self.adapters = tuple(adapters)
        self.places = {adapter: place for place, adapter in enumerate(adapters)}
        self.rank = max(adapter.rank for adapter in adapters)
        like = next(tensor for adapter in adapters for tensor in adapter.down if tensor is not None)
        self.down: list[Tensor] = []
        self.up: list[Tensor] = []
        for index, site in enumerate(sites):
            down = torch.zeros(len(adapters), self.rank, site.inputs, dtype=like.dtype, device=like.device)
            up = torch.zeros(len(adapters), self.rank, site.outputs, dtype=like.dtype, device=like.device)
            for place, adapter in enumerate(adapters):
                a, b = adapter.down[index], adapter.up[index]
                if a is not None and b is not None:
                    down[place, : adapter.rank] = a
                    torch.mul(b.t(), adapter.scale, out=up[place, : adapter.rank])
            self.down.append(down)
            self.up.append(up)


def mixed(stack: Stack, adapters: Sequence[Adapter | None]) -> Use:
    """How to run rows with these adapters of the stack, or none. Both ways compute the same sum."""
    places = [-1 if adapter is None else stack.places[adapter] for adapter in adapters]
    return (Dense if len(stack.adapters) * stack.rank <= WIDE else Grouped)(stack, places)


class Dense:
    """Few stacked columns: one product with all adapters, and every column that is not the row's own multiplied by zero."""

    def __init__(self, stack: Stack, places: Sequence[int]) -> None:
        self._stack = stack
        like = stack.down[0]
        own = torch.zeros(len(places), len(stack.adapters), stack.rank, dtype=like.dtype)
        for row, place in enumerate(places):
            if place >= 0:
                own[row, place] = 1.0
        self._own = own.view(len(places), 1, -1).to(like.device)

    def added(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        width = self._own.shape[-1]
        down, up = self._stack.down[site].view(width, -1), self._stack.up[site].view(width, -1)
        low = torch.mm(x.reshape(-1, x.shape[-1]), down.t()).view(*x.shape[:2], width) * self._own
        return torch.addmm(y.view(-1, y.shape[-1]), low.view(-1, width), up).view(y.shape)


class Grouped:
    """Many: rows gathered by adapter, as many places for each as the most frequent one needs, then one batched product."""

    def __init__(self, stack: Stack, places: Sequence[int]) -> None:
        self._stack = stack
        of = [[row for row, place in enumerate(places) if place == wanted] for wanted in range(len(stack.adapters))]
        most = max(map(len, of))
        filled = [row for rows in of for row in (*rows, *[0] * (most - len(rows)))]
        found = {row: wanted * most + rank for wanted, rows in enumerate(of) for rank, row in enumerate(rows)}
        adapted = sorted(found)
        where = stack.down[0].device
        self._gather = None if filled == list(range(len(places))) else torch.tensor(filled, device=where)
        self._scatter = torch.tensor([found[row] for row in adapted], device=where)
        self._rows = None if len(adapted) == len(places) else torch.tensor(adapted, device=where)

    def added(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        down, up = self._stack.down[site], self._stack.up[site]
        gathered = x if self._gather is None else x.index_select(0, self._gather)
        low = torch.bmm(gathered.reshape(len(down), -1, x.shape[-1]), down.transpose(1, 2))
        share = torch.bmm(low, up).view(-1, *y.shape[1:])
        if self._gather is not None:
            share = share.index_select(0, self._scatter)
        return y + share if self._rows is None else y.index_add(0, self._rows, share)


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
