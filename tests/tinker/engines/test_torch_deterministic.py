"""The deterministic engine: an answer depends on its request and its weights, bit for bit, and on nothing else."""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.train
pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.tinker.engines import torch_oracles as oracle
from tests.tinker.engines.conformance import request, version
from tinker.engines.engine import GenerateRequest, Generation
from tinker.engines.torch import TorchEngine
from tinker.models import DEMO
from tinker.protocol.values import BASE, LoraSpec, PolicyName, PolicyVersion

Tiny = Callable[[str], Path]
Answer = tuple[list[int], list[float]]


async def served(engine: TorchEngine, count: int = 3) -> list[PolicyVersion]:
    """Adapters of different rank, and the base."""
    found = [BASE]
    for number in range(count):
        name = f"p{number}"
        files = await engine.attach(PolicyName(name), LoraSpec(rank=2 + number, seed=number))
        await engine.load(version(name), oracle.noisy(files, number))
        found.append(version(name))
    return found


def asked(under: list[PolicyVersion], count: int, vocab: int) -> list[GenerateRequest]:
    """Requests that differ in everything, some with the same prompt, some of one seat that go on."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randrange(1, 60))] for _ in range(count // 2)]
    return [
        request(
            prompts[n % len(prompts)],
            under[n % len(under)],
            key=f"run/{n % 7}",
            max_tokens=1 + n % 9,
            temperature=(1.0, 0.6, 0.0)[n % 3],
            seed=n,
        )
        for n in range(count)
    ]


def exactly(answers: list[Generation]) -> list[Answer]:
    return [(answer.ids, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("model", ["qwen3", "qwen2", "llama", "demo"])
async def test_the_same_bits_alone_and_in_any_company_and_order(model: str, tiny: Tiny) -> None:
    folder = str(DEMO if model == "demo" else tiny(model))
    async with TorchEngine(folder, deterministic=True) as engine:
        under = await served(engine)
        wanted = asked(under, 40, 61)
        alone = exactly([await engine.generate(ask) for ask in wanted])
    async with TorchEngine(folder, deterministic=True, slots=11, threads=2) as engine:
        await served(engine)
        together = exactly(list(await asyncio.gather(*map(engine.generate, wanted))))
        order = random.Random(1).sample(range(len(wanted)), len(wanted))
        tasks = {}
        for place, index in enumerate(order):  # they arrive one by one, while others run
            tasks[index] = asyncio.create_task(engine.generate(wanted[index]))
            if place % 3 == 0:
                await engine.score(BASE, [])
        shuffled = exactly([await tasks[index] for index in range(len(wanted))])
    assert together == alone
    assert shuffled == alone


async def test_greedy_answers_and_logprobs_are_those_of_the_fast_engine(tiny: Tiny) -> None:
    answers = {}
    for deterministic in (False, True):
        async with TorchEngine(str(tiny("qwen3")), deterministic=deterministic) as engine:
            wanted = asked(await served(engine), 24, 61)
            answers[deterministic] = list(await asyncio.gather(*map(engine.generate, wanted)))
    for fast, exact in zip(answers[False], answers[True], strict=True):
        assert fast.ids == exact.ids
        assert fast.logprobs == pytest.approx(exact.logprobs, abs=1e-4)


async def test_equal_prompts_are_computed_once_here_too(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3")), deterministic=True, linger=0.05) as engine:
        wanted = [request(range(3, 23), key=f"g{n}", max_tokens=6, seed=n) for n in range(8)]
        together = exactly(list(await asyncio.gather(*map(engine.generate, wanted))))
        assert engine.prefilled == 20
        assert together == exactly([await engine.generate(ask) for ask in wanted])
