"""Which models the engine can run, found out by their configuration and by their numbers, before anything is served.

Three outcomes. *Batched*: rotary positions, full attention, and the model computes through our cache what it computes without one; rows
of any mix share a forward. *Plain*: a model with a cache of its own kind (sliding windows, states); it answers one request at a time
through that, as its own `generate` would. *Refused*: its logits are not those of its output layer alone, or it has no linear layers that
could be adapted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker.engines.engine import EngineError
from tinker.engines.torch.forward import Live, Own

if TYPE_CHECKING:
    from tinker.engines.torch.model import Model

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies do not change while a context grows
SHORT, LONG = 7, 12  # tokens of the two contexts that are tried


def reason_against_batching(config: Any) -> str:
    """Why the configuration rules the batched way out; "" if it does not."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"it has {', '.join(sorted(kinds - {'full_attention'}))} layers"
    if not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"its attention has a window of {config.sliding_window} tokens"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "it has no rotary positions"
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"its rotary positions are of the type {rope['rope_type']}"
    return ""


@torch.no_grad()
def disagreement(model: Model) -> str:
    """What is wrong when two contexts go through the model in two pieces, as they do in service; "" if the numbers are the same.

    EngineError if the output layer alone does not give the model's logits.
    """
    noise = torch.Generator().manual_seed(0)
    long, short = (torch.randint(model.card.vocab, (size,), generator=noise).tolist() for size in (LONG, SHORT))
    wanted = torch.stack([_whole(model, ids) for ids in (long, short)])
    scale = float(wanted.std()) + 1e-6
    tolerance = scale * (1e-3 if model.dtype == torch.float32 else 0.2)
    shapes = Shapes()
    try:
        model.router.use = shapes
        found = _in_pieces(model, long, short)
        model.router.use = None
    except Exception as error:  # whatever a model that we do not know raises
        return f"it does not run on this engine's cache ({type(error).__name__}: {error})"
    if shapes.odd and model.batched:
        return f"{model.router.sites[shapes.odd[0]].leaf} does not see its rows apart"
    gap = float((found - wanted).abs().max())
    return "" if gap <= tolerance else f"through this engine's cache its logits are {gap:.2g} off"


class Shapes:
    """Adds nothing, and notes the sites whose input is not [rows, tokens, inputs] (experts that see tokens of several rows)."""

    def __init__(self) -> None:
        self.odd: list[int] = []

    def added(self, site: int, x: Tensor, y: Tensor) -> Tensor:
        if x.dim() != 3:
            self.odd.append(site)
        return y


def _whole(model: Model, ids: list[int]) -> Tensor:
    """Logits after the last id, by the model itself."""
    rows = torch.tensor([ids], device=model.device)
    logits: Tensor = model.causal(input_ids=rows, use_cache=False).logits[0, -1].float()
    ours = model.logits(model.hidden(rows, use_cache=False)[0, -1])
    gap, scale = float((ours - logits).abs().max()), float(logits.std()) + 1e-6
    if not gap <= scale * (1e-3 if model.dtype == torch.float32 else 0.2):
        raise EngineError(
            f"{model.card.name} does more to its logits than its output layer (they are {gap:.2g} off); this engine cannot run it: "
            "choose a Llama, Qwen2 or Qwen3"
        )
    return logits


def _in_pieces(model: Model, long: list[int], short: list[int]) -> Tensor:
    if not model.batched:
        own = Own(model)
        own.reserve(2, LONG)
        return torch.cat(
            [
                own.extend(row, [0], [ids[:4]]) if piece == 0 else own.extend(row, [4], [ids[4:]])
                for row, ids in enumerate((long, short))
                for piece in (0, 1)
            ]
        )[1::2]
    live = Live(model, 2)
    live.reserve(2, LONG)
    live.extend(0, [0, 0], [long[:5], short[:3]])
    return live.extend(0, [5, 3], [long[5:], short[3:]])
