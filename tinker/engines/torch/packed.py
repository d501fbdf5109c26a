"""Products with frozen weights, faster: the weight laid out once as the processor's library wants it.

A batch of a few rows is bound by reading the weights, and tiles are read up to twice as fast as rows are. It costs a second copy of the
weights. Used for fp32 on the CPU, where torch's oneDNN offers it, without gradients; everything else takes the ordinary path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 16  # numbers in a weight, from which on packing pays
FEW, TYPICAL = 4, 32  # rows: fewer gain nothing; the layout is made for about so many


class FrozenLinear(nn.Module):
    """A linear layer whose weight never changes and is shared with the layer that it stands for."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._own = linear.weight, linear.bias, packed(linear.weight)  # the attributes of a module are slow to find

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, packed = self._own
        if packed is None or not torch.is_inference_mode_enabled() or x.numel() < FEW * x.shape[-1]:
            return F.linear(x, weight, bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return y


def packed(weight: Tensor) -> Tensor | None:
    """The weight in the library's own layout, or None where that does not exist or does not pay."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < LARGE:
        return None
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    with torch.no_grad():
        try:
            made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL)
            return made
        except (AttributeError, RuntimeError):  # not in this build of torch
            return None
