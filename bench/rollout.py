"""Rollout throughput: many adapters in one batch of our engine, against PEFT with one generate per agent and with `adapter_names=`.

    python bench/rollout.py [--model DIR] [--agents 8] [--rows 32] [--repeats 5]

The same work for all three: every row has a prompt of its own and makes exactly `--tokens` new ones, sampled at temperature 1 (the model is
copied without its end-of-sequence ids). The three are interleaved, so that whatever else the machine does hits them alike; the unit is
sampled tokens per CPU second of the process, all its threads and the prompts included; reported is the median over the repeats. Prints
markdown. Needs OMP_WAIT_POLICY=PASSIVE and starts itself again with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

ROOT = Path(__file__).resolve().parent.parent
PER_AGENT = "PEFT, set_adapter and one generate per agent"
TOGETHER = "PEFT, one generate with adapter_names"
OURS = "this engine, all adapters in one batch"
BARS = {PER_AGENT: 3.0, TOGETHER: 2.0}


@dataclass(frozen=True)
class Work:
    """What every contestant does once: `prompts` [rows][tokens], row i for agent `owners[i]`, `tokens` new ones each."""

    prompts: list[list[int]]
    owners: list[str]
    tokens: int


def main() -> None:
    wanted = options()
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(wanted, Path(folder)))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tinker" / "models" / "demo")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


async def measure(wanted: argparse.Namespace, folder: Path) -> None:
    import torch

    from tinker.engines.torch import TorchEngine

    torch.set_num_threads(wanted.threads)
    model = without_stops(wanted.model, folder / "model")
    async with TorchEngine(
        str(model), slots=wanted.rows, threads=wanted.threads, adapter_slots=wanted.agents
    ) as engine:
        noise = np.random.default_rng(0)
        agents = [f"agent{number}" for number in range(wanted.agents)]
        directories = [
            await make_adapter(engine, name, number, wanted.rank, noise, folder) for number, name in enumerate(agents)
        ]
        work = Work(
            prompts=noise.integers(0, engine.card.vocab, (wanted.rows, wanted.prompt)).tolist(),
            owners=[agents[row % len(agents)] for row in range(wanted.rows)],
            tokens=wanted.tokens,
        )
        peft = peft_model(model, dict(zip(agents, directories, strict=True)))
        contestants: dict[str, Callable[[int], Awaitable[int]]] = {
            PER_AGENT: lambda turn: one_generate_per_agent(peft, work),
            TOGETHER: lambda turn: one_generate_for_all(peft, work),
            OURS: lambda turn: our_engine(engine, work, turn),
        }
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(-1, wanted.repeats):  # turn -1 warms up
            for name, generate in contestants.items():
                begin = time.process_time()
                count = await generate(turn)
                if count != wanted.rows * wanted.tokens:
                    raise SystemExit(
                        f"{name} made {count} tokens instead of {wanted.rows * wanted.tokens}; the comparison is void"
                    )
                if turn >= 0:
                    speeds[name].append(count / (time.process_time() - begin))
    report(wanted, speeds)


def without_stops(source: Path, target: Path) -> Path:
    """A copy of the model that never ends a reply by itself."""
    target.mkdir()
    shutil.copy(source / "model.safetensors", target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": None, "pad_token_id": 0}))
    return target


async def make_adapter(engine: Any, name: str, seed: int, rank: int, noise: np.random.Generator, folder: Path) -> Path:
    """Loads an adapter that is not zero as version 1 of the agent, and leaves the same as a PEFT directory."""
    from tinker.protocol.values import LoraSpec, PolicyName, PolicyVersion

    files = dict(await engine.attach(PolicyName(name), LoraSpec(rank=rank, alpha=2.0 * rank, seed=seed)))
    weights = load(files["adapter_model.safetensors"])
    for key, value in weights.items():
        if "lora_B" in key:
            weights[key] = noise.normal(0.0, 0.05, value.shape).astype(np.float32)
    files["adapter_model.safetensors"] = save(weights, metadata={"format": "pt"})
    await engine.load(PolicyVersion(PolicyName(name), 1), files)
    (folder / name).mkdir()
    for file, data in files.items():
        (folder / name / file).write_bytes(data)
    return folder / name


def peft_model(model: Path, adapters: dict[str, Path]) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (first, place), *others = adapters.items()
    peft = PeftModel.from_pretrained(bare, str(place), adapter_name=first)
    for name, place in others:
        peft.load_adapter(str(place), adapter_name=name)
    return peft.eval()


def generated(peft: Any, work: Work, rows: list[int], **more: Any) -> int:
    import torch

    ids = torch.tensor([work.prompts[row] for row in rows])
    with torch.inference_mode():
        out = peft.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
            max_new_tokens=work.tokens, pad_token_id=0, **more,
        )  # fmt: skip
    return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


async def one_generate_per_agent(peft: Any, work: Work) -> int:
    total = 0
    for name in dict.fromkeys(work.owners):
        peft.set_adapter(name)
        total += generated(peft, work, [row for row, owner in enumerate(work.owners) if owner == name])
    return total


async def one_generate_for_all(peft: Any, work: Work) -> int:
    return generated(peft, work, list(range(len(work.prompts))), adapter_names=work.owners)


async def our_engine(engine: Any, work: Work, turn: int) -> int:
    from tinker.engines.engine import GenerateRequest
    from tinker.protocol.values import PolicyName, PolicyVersion, Sampling

    requests = [
        GenerateRequest(f"{turn}/{row}", PolicyVersion(PolicyName(owner), 1), prompt, Sampling(work.tokens, seed=row))
        for row, (owner, prompt) in enumerate(zip(work.owners, work.prompts, strict=True))
    ]
    return sum(len(answer.ids) for answer in await asyncio.gather(*map(engine.generate, requests)))


def report(wanted: argparse.Namespace, speeds: dict[str, list[float]]) -> None:
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    print(
        f"{wanted.agents} agents (LoRA rank {wanted.rank}), {wanted.rows} rows, {wanted.prompt}-token prompts, {wanted.tokens} new tokens, "
        f"{wanted.threads} thread(s), median of {wanted.repeats} interleaved runs\n"
    )
    print("| | sampled tokens per CPU second | this engine against it | wanted |\n|---|---|---|---|")
    for name, speed in middle.items():
        ratio, bar = (f"{middle[OURS] / speed:.1f}x", f">= {BARS[name]:.0f}x") if name in BARS else ("", "")
        print(f"| {name} | {speed:,.0f} | {ratio} | {bar} |")
    met = all(middle[OURS] >= bar * middle[name] for name, bar in BARS.items())
    print(f"\nBars met: {'yes' if met else 'no'}")


if __name__ == "__main__":
    main()
