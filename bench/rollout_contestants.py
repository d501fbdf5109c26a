"""Who is measured in `rollout.py`: our engine, PEFT one agent at a time, PEFT with mixed batches, and transformers without any adapter.

All get the same work: every row has a prompt of its own and makes exactly so many new tokens, sampled at temperature 1. The model is a copy
without its end-of-sequence ids, so that no row ends early. Each contestant returns how many tokens it made.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from tinker.engines.engine import GenerateRequest
from tinker.engines.torch import TorchEngine
from tinker.protocol.values import BASE, LoraSpec, PolicyName, PolicyVersion, Sampling

PER_AGENT = "PEFT, set_adapter and one generate per agent"
TOGETHER = "PEFT, one generate with adapter_names"
BARE = "transformers, generate of the bare base model"
OURS = "this engine, all adapters in one batch"
ONE = "this engine, one adapter for all rows"
Contestant = Callable[[], Awaitable[int]]


@dataclass(frozen=True)
class Work:
    """`prompts` [rows][tokens], row i for agent `owners[i]`, `tokens` new ones each."""

    prompts: list[list[int]]
    owners: list[str]
    tokens: int


def work(vocab: int, agents: Sequence[str], rows: int, prompt: int, tokens: int, seed: int = 0) -> Work:
    noise = np.random.default_rng(seed)
    return Work(
        noise.integers(0, vocab, (rows, prompt)).tolist(), [agents[row % len(agents)] for row in range(rows)], tokens
    )


def without_stops(source: Path, target: Path) -> Path:
    """A copy of the model that never ends a reply by itself. Its weights are the same file."""
    target.mkdir()
    (target / "model.safetensors").symlink_to((source / "model.safetensors").resolve())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": None, "pad_token_id": 0}))
    return target


async def adapters(engine: TorchEngine, agents: Sequence[str], rank: int, folder: Path) -> dict[str, Path]:
    """Loads an adapter that is not zero as version 1 of each agent, and leaves the same as PEFT directories."""
    noise = np.random.default_rng(1)
    made = {}
    for number, agent in enumerate(agents):
        name = PolicyName(agent)
        files = dict(await engine.attach(name, LoraSpec(rank=rank, alpha=2.0 * rank, seed=number)))
        await engine.detach(name)
        weights = load(files["adapter_model.safetensors"])
        for key, value in weights.items():
            if "lora_B" in key:
                weights[key] = noise.normal(0.0, 0.02, value.shape).astype(np.float32)
        files["adapter_model.safetensors"] = save(weights, metadata={"format": "pt"})
        await engine.load(PolicyVersion(name, 1), files)
        made[agent] = folder / agent
        shutil.rmtree(made[agent], ignore_errors=True)
        made[agent].mkdir()
        for file, data in files.items():
            (made[agent] / file).write_bytes(data)
    return made


async def ours(engine: TorchEngine, todo: Work, key: str, *, one: bool = False) -> int:
    requests = [
        GenerateRequest(
            f"{key}/{row}", PolicyVersion(PolicyName(todo.owners[0] if one else owner), 1), prompt, Sampling(todo.tokens, seed=row)
        )
        for row, (owner, prompt) in enumerate(zip(todo.owners, todo.prompts, strict=True))
    ]  # fmt: skip
    made = sum(len(answer.ids) for answer in await asyncio.gather(*map(engine.generate, requests)))
    await engine.forget("")
    return made


def bare_model(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def peft_model(model: Path, directories: dict[str, Path]) -> Any:
    from peft import PeftModel

    (first, place), *others = directories.items()
    peft = PeftModel.from_pretrained(bare_model(model), str(place), adapter_name=first)
    for name, place in others:
        peft.load_adapter(str(place), adapter_name=name)
    return peft.eval()


def generated(model: Any, todo: Work, rows: Sequence[int], **more: Any) -> int:
    import torch

    ids = torch.tensor([todo.prompts[row] for row in rows])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
            max_new_tokens=todo.tokens, pad_token_id=0, **more,
        )  # fmt: skip
    return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


async def per_agent(peft: Any, todo: Work) -> int:
    total = 0
    for name in dict.fromkeys(todo.owners):
        peft.set_adapter(name)
        total += generated(peft, todo, [row for row, owner in enumerate(todo.owners) if owner == name])
    return total


async def together(peft: Any, todo: Work) -> int:
    return generated(peft, todo, range(len(todo.prompts)), adapter_names=todo.owners)


async def bare(model: Any, todo: Work) -> int:
    return generated(model, todo, range(len(todo.prompts)))


def base_request(key: str, prompt: Sequence[int], tokens: int, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(key, BASE, list(prompt), Sampling(tokens, seed=seed))
