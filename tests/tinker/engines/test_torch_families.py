"""Which models the engine runs, in which way, and which it refuses: found out by their numbers, on tiny random models."""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore::FutureWarning")]
pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.tinker.engines import torch_oracles as oracle
from tests.tinker.engines.conformance import ADAM, LOSS, request, row, version
from tests.tinker.engines.conftest import SHAPE
from tinker.engines.engine import EngineError
from tinker.engines.torch import TorchEngine
from tinker.engines.torch.model import load_model
from tinker.protocol.values import BASE, LoraSpec, PolicyName

Make = Callable[..., Path]
BATCHED = {
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "olmo2": ("Olmo2", {}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "llama with scaled positions": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
}
PLAIN = {
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "llama with positions that change": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make("Llama", rope_theta=...)` saves a random model of that architecture."""

    def made(architecture: str, **more: Any) -> Path:
        torch.manual_seed(3)
        transformers.utils.logging.disable_progress_bar()
        config = getattr(transformers, f"{architecture}Config")(**{**SHAPE, **more})
        causal = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in causal.parameters():
                if weight.ndim == 2:
                    weight.normal_(std=0.2)
        causal.save_pretrained(tmp_path / architecture)
        return tmp_path / architecture

    return made


async def compare(folder: Path, place: Path) -> None:
    """Greedy answers of base and adapter, several at once and over two turns, against transformers and PEFT, one by one."""
    bare = oracle.bare(folder)
    async with TorchEngine(str(folder)) as engine:
        files = oracle.noisy(
            await engine.attach(PolicyName("ann"), LoraSpec(rank=3, targets=engine.card.lora_targets)), seed=1
        )
        await engine.load(version("ann"), files)
        models = {BASE: bare, version("ann"): oracle.with_adapter(folder, files, place)}
        contexts = [(list(range(3, 3 + length)), under) for length in (1, 8, 25) for under in models]
        for _ in range(2):
            asked = [
                request(ids, under, key=str(n), max_tokens=8, temperature=0.0)
                for n, (ids, under) in enumerate(contexts)
            ]
            answers = await asyncio.gather(*map(engine.generate, asked))
            for (ids, under), answer in zip(contexts, answers, strict=True):
                wanted = oracle.logprobs(models[under], [*ids, *answer.ids])[len(ids) :]
                assert answer.logprobs == pytest.approx(wanted, abs=1e-4)
                given = torch.tensor([ids])
                said = models[under].generate(
                    input_ids=given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=8
                )
                assert answer.ids == said[0, len(ids) :].tolist()
                ids += [*answer.ids, 5, 6]
        scored = await engine.score(version("ann"), [row(contexts[1][0], 1)])
        assert scored[0] == pytest.approx(oracle.logprobs(models[version("ann")], contexts[1][0]), abs=1e-4)


@pytest.mark.parametrize("which", BATCHED)
async def test_any_rotary_decoder_with_full_attention_is_batched(which: str, make: Make, tmp_path: Path) -> None:
    folder = make(BATCHED[which][0], **BATCHED[which][1])
    assert load_model(str(folder)).batched
    await compare(folder, tmp_path / "adapter")


@pytest.mark.parametrize("which", PLAIN)
async def test_a_model_with_a_cache_of_its_own_kind_answers_one_by_one_and_says_so(
    which: str, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(PLAIN[which][0], **PLAIN[which][1])
    with caplog.at_level(logging.WARNING):
        model = load_model(str(folder))
    assert not model.batched
    assert f"one request at a time and keeps nothing between turns, because {model.why}" in caplog.text
    await compare(folder, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("Granite", {"logits_scaling": 8.0}, "does more to its logits than its output layer"),
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, "no linear layers"),
    ],
)
async def test_a_model_whose_numbers_would_be_wrong_is_refused(
    architecture: str, more: dict[str, Any], message: str, make: Make
) -> None:
    folder = make(architecture, **more)
    with pytest.raises(EngineError, match=message):
        async with TorchEngine(str(folder)):
            pass


async def test_a_model_that_is_no_language_model_is_refused(make: Make) -> None:
    folder = make("Llama")
    config = (folder / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "vit"')
    (folder / "config.json").write_text(config)
    with pytest.raises(EngineError, match="a vit model, which transformers cannot load here"):
        load_model(str(folder))


async def test_a_policy_on_a_plain_model_is_trained_as_well(make: Make) -> None:
    async with TorchEngine(str(make("Mistral", sliding_window=9))) as engine:
        start = dict(await engine.attach(PolicyName("ann"), LoraSpec()))
        await engine.forward_backward(PolicyName("ann"), [row(list(range(3, 30)), 5)], LOSS)
        assert (await engine.optim_step(PolicyName("ann"), ADAM))["stepped"] == 1.0
        assert dict(await engine.publish(PolicyName("ann"))) != start


async def test_bfloat16_serves_scores_and_trains_near_the_numbers_of_float32(make: Make) -> None:
    """Within what rounding to 8 bits does to these weights; adapters stay in fp32 on their way."""
    folder = make("Qwen3", head_dim=8)
    found = {}
    for dtype in ("float32", "bfloat16"):
        async with TorchEngine(str(folder), dtype=dtype) as engine:
            files = oracle.noisy(await engine.attach(PolicyName("ann"), LoraSpec()), seed=1, size=0.1)
            other = oracle.noisy(await engine.attach(PolicyName("bob"), LoraSpec(rank=4)), seed=2, size=0.1)
            await engine.load(version("ann"), files)
            await engine.load(version("bob"), other)
            under = (BASE, version("ann"), version("bob"))
            asked = [request(range(3, 12 + n), under[n % 3], key=str(n), temperature=0.0) for n in range(6)]
            answers = await asyncio.gather(*map(engine.generate, asked))
            scored = await engine.score(version("ann"), [row(list(range(3, 30)), 1)])
            for ask, answer in zip(asked, answers, strict=True):
                again = (await engine.score(ask.policy, [row([*ask.prompt, *answer.ids], 1)]))[0][len(ask.prompt) :]
                assert answer.logprobs == pytest.approx(again, abs=0.3)
            measured = await engine.forward_backward(PolicyName("ann"), [row(list(range(3, 30)), 5)], LOSS)
            assert (await engine.optim_step(PolicyName("ann"), ADAM))["stepped"] == 1.0
            weights = oracle.matrices(await engine.publish(PolicyName("ann")))
            assert {str(matrix.dtype) for matrix in weights.values()} == {"float32"}
            found[dtype] = scored[0], measured["loss"]
    assert found["bfloat16"][0] == pytest.approx(found["float32"][0], abs=0.5)
    assert found["bfloat16"][0] != pytest.approx(found["float32"][0], abs=1e-4)
    assert found["bfloat16"][1] == pytest.approx(found["float32"][1], abs=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
        ({"dtype": "int4"}, "dtype is 'int4'; give float32, bfloat16 or auto"),
    ],
)
async def test_a_device_or_a_precision_that_is_not_there_is_refused(
    settings: dict[str, str], message: str, tiny: Callable[[str], Path]
) -> None:
    with pytest.raises(EngineError, match=message):
        load_model(str(tiny("qwen3")), **settings)
