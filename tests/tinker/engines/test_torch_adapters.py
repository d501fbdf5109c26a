# ruff: noqa: E402
"""Adapters as files: PEFT reads what we write, we read what PEFT writes, and what does not fit is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore::FutureWarning")]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from safetensors.numpy import load, save

from tests.tinker.engines import torch_oracles as oracle
from tests.tinker.engines.conformance import ANN, request, row, version
from tinker.engines.engine import EngineError
from tinker.engines.torch import TorchEngine
from tinker.protocol.values import LoraSpec

Tiny = Callable[[str], Path]
IDS = [5, 9, 14, 3, 3, 27, 60, 8]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
async def test_peft_reads_a_published_adapter_and_scores_the_same(family: str, tiny: Tiny, tmp_path: Path) -> None:
    async with TorchEngine(str(tiny(family))) as engine:
        files = oracle.noisy(await engine.attach(ANN, LoraSpec(rank=3, alpha=7.0)), 1)
        await engine.load(version("ann", 1), files)
        ours = (await engine.score(version("ann", 1), [row(IDS, 1)]))[0]
    theirs = oracle.logprobs(oracle.with_adapter(tiny(family), files, tmp_path / "ann"), IDS)
    bare = oracle.logprobs(oracle.bare(tiny(family)), IDS)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours != pytest.approx(bare, abs=1e-2)


@pytest.mark.parametrize("rslora", [False, True])
async def test_an_adapter_made_by_peft_is_served(rslora: bool, tiny: Tiny, tmp_path: Path) -> None:
    torch.manual_seed(3)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM", use_rslora=rslora
    )  # fmt: skip
    model = peft.get_peft_model(oracle.bare(tiny("qwen3")), lora).eval()
    model.save_pretrained(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.load(version("ann", 1), files)
        ours = (await engine.score(version("ann", 1), [row(IDS, 1)]))[0]
    assert ours == pytest.approx(oracle.logprobs(model, IDS), abs=1e-4)


async def test_a_fresh_adapter_changes_nothing(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.load(version("ann"), await engine.attach(ANN, LoraSpec()))
        ours = (await engine.score(version("ann"), [row(IDS, 1)]))[0]
    assert ours == pytest.approx(oracle.logprobs(oracle.bare(tiny("qwen3")), IDS), abs=1e-5)


async def test_scale_is_the_same_after_unloading_and_loading_again(tiny: Tiny, tmp_path: Path) -> None:
    """One adapter slot: load X, Y in its place, X again. X's answer is the same, and PEFT's; the bytes were not touched."""
    async with TorchEngine(str(tiny("qwen3")), adapter_slots=1) as engine:
        blank = await engine.attach(ANN, LoraSpec(rank=8, alpha=16.0))
        x, y = oracle.noisy(blank, 1), oracle.noisy(blank, 2)
        copy = dict(x)
        scores = []
        for files in (x, y, x):
            await engine.load(version("ann", 1), files)
            with pytest.raises(EngineError, match="all 1 adapter slots are taken"):
                await engine.load(version("ann", 2), files)
            answer = await engine.generate(request(IDS, version("ann", 1), max_tokens=2, temperature=0.0))
            scores.append((answer.logprobs, await engine.score(version("ann", 1), [row(IDS, 1)])))
            await engine.unload(version("ann", 1))
    assert scores[0] == scores[2] != scores[1]
    assert x == copy
    theirs = oracle.logprobs(oracle.with_adapter(tiny("qwen3"), x, tmp_path / "x"), IDS)
    assert scores[0][1][0] == pytest.approx(theirs, abs=1e-4)


def renamed(files: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    weights = {name.replace(old, new): value for name, value in load(files["adapter_model.safetensors"]).items()}
    return {**files, "adapter_model.safetensors": save(weights)}


def configured(files: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    return {
        **files,
        "adapter_config.json": json.dumps({**json.loads(files["adapter_config.json"]), **changes}).encode(),
    }


async def test_what_does_not_fit_is_refused_with_the_reason(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        good = dict(await engine.attach(ANN, LoraSpec(rank=4)))
        broken = load(good["adapter_model.safetensors"])
        broken.pop(sorted(broken)[0])
        for files, message in (
            (renamed(good, "layers.1.", "layers.7."), r"layers\.7.*another base model"),
            (renamed(good, "mlp.up_proj", "mlp.fc1"), r"fc1.*another base model"),
            (renamed(good, "model.layers.0.self_attn.q_proj", "lm_head"), r"lm_head.*lacks or cannot adapt"),
            (configured(good, r=8), r"\(4, 32\).*needs \(8, 32\)"),
            (configured(good, use_dora=True, bias="all"), "use_dora, bias"),
            (configured(good, modules_to_save=["lm_head"]), "modules_to_save"),
            (configured(good, peft_type="IA3"), "IA3"),
            ({**good, "adapter_config.json": b"{"}, "not JSON"),
            ({**good, "adapter_model.safetensors": b"nonsense"}, "not a readable safetensors"),
            ({**good, "adapter_model.safetensors": save({})}, "holds no weights"),
            ({**good, "adapter_model.safetensors": save(broken)}, "only one of lora_A and lora_B"),
            (oracle.noisy(good, 1, float("nan")), "not finite"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.load(version("ann", 1), files)
        await engine.load(version("ann", 1), good)


async def test_an_adapter_of_another_base_is_refused_by_its_shapes(tiny: Tiny, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config.from_pretrained(tiny("qwen3"))
    config.intermediate_size = 64
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    async with TorchEngine(str(tmp_path / "other")) as other:
        files = await other.attach(ANN, LoraSpec())
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        with pytest.raises(
            EngineError, match=r"\(64, 8\); tiny with rank 8 needs.*\(48, 8\): it belongs to another base model"
        ):
            await engine.load(version("ann"), files)
