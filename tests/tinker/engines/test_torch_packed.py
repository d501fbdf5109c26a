"""Packed weights compute what the layer computes, where they are used, and stand aside where gradients are wanted."""

# ruff: noqa: E402
from __future__ import annotations

import pytest

pytestmark = pytest.mark.train
pytest.importorskip("torch")

import torch
from torch import nn

from tinker.engines.torch.packed import FrozenLinear, packed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4, 1), (32, 1), (1, 40), (5, 7)])
def test_a_packed_layer_gives_the_same_numbers(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(384, 640, bias=bias)
    x = torch.randn(*shape, 384)
    with torch.inference_mode():
        assert torch.allclose(FrozenLinear(linear)(x), linear(x), atol=1e-5)


def test_a_row_that_is_no_slice_of_its_own_is_read_right() -> None:
    """What attention hands over: rows whose numbers do not lie side by side."""
    linear = nn.Linear(384, 640)
    x = torch.randn(8, 384, 6).transpose(1, 2)
    with torch.inference_mode():
        assert torch.allclose(FrozenLinear(linear)(x), linear(x), atol=1e-5)


def test_gradients_take_the_ordinary_path() -> None:
    linear = nn.Linear(384, 640).requires_grad_(False)
    x = torch.randn(8, 1, 384, requires_grad=True)
    FrozenLinear(linear)(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[0, 0], linear.weight.sum(0), atol=1e-4)


def test_what_cannot_be_packed_is_not() -> None:
    assert packed(torch.zeros(4, 4)) is None
    assert packed(torch.zeros(512, 512, dtype=torch.bfloat16)) is None
    assert packed(torch.zeros(512, 512, device="meta")) is None
