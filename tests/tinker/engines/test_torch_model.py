# ruff: noqa: E402
"""Loading: what a card says, and what is refused before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.train
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models

from tinker.engines.engine import EngineError
from tinker.engines.torch import TorchEngine
from tinker.protocol.values import ModelCard

Tiny = Callable[[str], Path]


@pytest.fixture
def model(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(tiny("qwen3"), tmp_path / "model"))


async def card_of(folder: Path, **settings: int) -> ModelCard:
    async with TorchEngine(str(folder), **settings) as engine:
        return engine.card


def give_tokenizer(folder: Path, ids: int) -> None:
    Tokenizer(models.WordLevel({f"w{n}": n for n in range(ids)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


async def test_the_card_tells_vocabulary_context_ends_and_targets(model: Path) -> None:
    give_tokenizer(model, 61)
    card = await card_of(model)
    assert (card.name, card.vocab, card.context, card.eos_ids) == ("model", 61, 128, (2,))
    assert set(card.lora_targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(card.digest) == len(card.tokenizer) == 64
    assert (await card_of(model, max_context=50)).context == 50


async def test_the_digest_follows_the_weights_and_not_the_place(model: Path, tiny: Tiny) -> None:
    assert (await card_of(model)).digest == (await card_of(tiny("qwen3"))).digest
    changed = transformers.AutoModelForCausalLM.from_pretrained(model)
    changed.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1.0
    changed.save_pretrained(model)
    assert (await card_of(model)).digest != (await card_of(tiny("qwen3"))).digest


async def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(model: Path) -> None:
    give_tokenizer(model, 65)
    with pytest.raises(EngineError, match=r"65 ids but the model embeds 61"):
        await card_of(model)


async def test_a_directory_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="no weights in"):
        await card_of(model)


async def test_weights_that_lack_a_layer_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"lacks \d+ weights"):
        await card_of(model)


async def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model directory"):
        await card_of(tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"no config\.json"):
        await card_of(tmp_path)
