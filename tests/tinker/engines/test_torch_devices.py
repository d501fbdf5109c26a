"""The path of a GPU without a GPU: on another device, without data, every operation is watched for arguments that do not lie together."""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore::FutureWarning")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tinker.engines.conftest import SHAPE
from tinker.engines.torch.forward import Live
from tinker.engines.torch.lora import Adapter, One, Stack, fresh, mixed
from tinker.engines.torch.model import Model, _with_sites
from tinker.engines.torch.packed import FrozenLinear
from tinker.engines.torch.sampling import plan
from tinker.engines.torch.train import Policy
from tinker.protocol.values import LoraSpec, ModelCard

ELSEWHERE = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU would refuse. Only copies may see two devices; numbers without dimensions may lie anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.dim()]
        if len({each.device for each in given}) > 1 and "copy" not in str(func):
            raise RuntimeError(f"{func} has arguments on more than one device")
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    dtype = getattr(torch, request.param)
    config = transformers.Qwen3Config(**SHAPE, head_dim=8, attn_implementation="eager")
    with ELSEWHERE:
        causal = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)
    router = _with_sites(causal.model, "model")
    card = ModelCard("nowhere", "", "", 61, 128, (2,), tuple(dict.fromkeys(site.leaf for site in router.sites)))
    with OneDevice():
        yield Model(
            card, causal, causal.model, FrozenLinear(causal.lm_head), router, 2, 2, 8, "cache", ELSEWHERE, dtype
        )


def adapters(model: Model, count: int) -> list[Adapter]:
    sites = model.router.sites
    made = []
    for number in range(count):
        values = fresh(4, 8.0, [True] * len(sites), sites, number)
        down, up = zip(*(pair for pair in values if pair is not None), strict=True)
        made.append(Adapter(4, 8.0, down, up).to(model.device, model.dtype))
    return made


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_a_forward_of_rows_with_any_adapters_stays_on_its_device(model: Model, count: int) -> None:
    """No adapter, one, few (dense) and many (grouped); prompts of different lengths, then single tokens, then a plan for the sampler."""
    served = adapters(model, count)
    rows = [served[n % count] if count and n % 5 else None for n in range(20)]
    live = Live(model, 20)
    live.reserve(20, 12)
    model.router.use = model.router.rows(rows)
    logits = live.extend(0, [0] * 20, [[3] * (1 + n % 9) for n in range(20)])
    logits = live.extend(0, [1 + n % 9 for n in range(20)], [[4]] * 20)
    assert (logits.device, logits.dtype, tuple(logits.shape)) == (ELSEWHERE, torch.float32, (20, 61))
    wanted = plan([0.5, 0.0] * 10, ELSEWHERE)
    assert {wanted.inverse.device, wanted.greedy.device} == {ELSEWHERE}  # type: ignore[union-attr]


def test_a_policy_and_its_gradient_lie_where_the_model_computes(model: Model) -> None:
    policy = Policy(LoraSpec(rank=4), model.router.sites, ELSEWHERE)
    site = model.router.sites[0]
    x = torch.zeros(2, 3, site.inputs, dtype=model.dtype, device=ELSEWHERE)
    y = torch.zeros(2, 3, site.outputs, dtype=model.dtype, device=ELSEWHERE)
    added = One(policy.adapter).added(0, x, y)
    added.sum().backward()
    assert {each.device for each in (added, policy.weights, policy.gradient)} == {ELSEWHERE}
    assert (added.dtype, policy.weights.dtype) == (model.dtype, torch.float32)


def test_what_lies_apart_is_found_by_this_test(model: Model) -> None:
    policy = Policy(LoraSpec(rank=4), model.router.sites, torch.device("cpu"))
    model.router.use = One(policy.adapter)
    live = Live(model, 1)
    with pytest.raises(RuntimeError, match="more than one device"):
        live.extend(0, [0], [[3, 4]])


def test_many_adapters_are_stacked_where_they_lie(model: Model) -> None:
    stack = Stack(adapters(model, 3), model.router.sites)
    assert {each.device for each in (*stack.down, *stack.up)} == {ELSEWHERE}
    assert mixed(stack, stack.adapters) is not None
