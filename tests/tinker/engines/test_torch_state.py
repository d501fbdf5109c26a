"""A state that is saved by one process is gone on with in another, bit for bit."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, LoraSpec, LossSpec, PolicyName

pytestmark = pytest.mark.train
ANN = PolicyName("ann")
LOSS = LossSpec("ppo", kl=0.1, entropy=0.01)


def batch(number: int) -> list[Row]:
    """The rows of step `number`: of different lengths, with ratios, advantages and weights of their own."""
    rng = np.random.default_rng(number)
    rows = []
    for length in rng.integers(4, 20, size=5):
        mask = np.arange(length) >= 2
        old, advantages = rng.normal(-4.0, 0.3, length), rng.normal(0.0, 1.0, length)
        columns = (np.where(mask, each, 0.0).astype(np.float32) for each in (old, advantages, np.full(length, 0.2)))
        rows.append(Row(rng.integers(3, 60, length).astype(np.int32), mask, *columns))
    return rows


async def go_on(model: str, begin: int, end: int, state: dict[str, bytes] | None) -> dict[str, bytes]:
    """Steps `begin` to `end` (exclusive); returns the state after them."""
    from tinker.engines.torch import TorchEngine

    async with TorchEngine(model, threads=1) as engine:
        if state is None:
            await engine.attach(ANN, LoraSpec(rank=4, seed=5))
        else:
            await engine.load_state(ANN, state)
        for number in range(begin, end):
            await engine.forward_backward(ANN, batch(number), LOSS)
            await engine.forward_backward(ANN, batch(1000 + number), LOSS)
            await engine.optim_step(ANN, AdamSpec(lr=1e-3 * (number + 1), weight_decay=0.01))
        return dict(await engine.save_state(ANN))


def main(model: str, begin: str, end: str, source: str, target: str) -> None:
    """In a process of its own: the state is in files."""
    read = {path.name: path.read_bytes() for path in Path(source).iterdir()} if source else None
    for name, data in asyncio.run(go_on(model, int(begin), int(end), read)).items():
        (Path(target) / name).write_bytes(data)


async def test_another_process_goes_on_from_a_saved_state_bit_for_bit(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(tiny("qwen3"))
    places = [tmp_path / name for name in ("half", "whole")]
    for place in places:
        place.mkdir()
    for begin, end, source, target in ((0, 3, "", places[0]), (3, 6, str(places[0]), places[1])):
        arguments = [model, str(begin), str(end), source, str(target)]
        await anyio.run_process([sys.executable, __file__, *arguments])
    uninterrupted = await go_on(model, 0, 6, None)
    assert {path.name: path.read_bytes() for path in places[1].iterdir()} == uninterrupted


async def test_momentum_is_part_of_the_state(tiny: Callable[[str], Path]) -> None:
    """Else the first step after loading would be another one: what a state of weights alone gives."""
    from safetensors.torch import load

    model = str(tiny("qwen3"))
    tensors = load((await go_on(model, 0, 2, None))["state.safetensors"])
    assert float(tensors["step"]) == 2.0
    assert float(tensors["exp_avg"].abs().max()) > 0.0 < float(tensors["exp_avg_sq"].max())


if __name__ == "__main__":
    main(*sys.argv[1:])
