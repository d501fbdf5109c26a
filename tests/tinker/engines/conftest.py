"""Tiny random models, made once per session and saved where the engine loads them from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported; else idle threads spin

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny("qwen3")` is the directory of a random model of that family; its logits are spread enough to tell tokens apart."""
    made: dict[str, Path] = {}

    def model(family: str = "qwen3") -> Path:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        torch.set_num_threads(1)  # of the thread that runs the references; each engine sets its own
        if family not in made:
            config, causal = {
                "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
                "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
                "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            }[family]
            extra = {"head_dim": 8} if family == "qwen3" else {}
            torch.manual_seed(7)
            transformers.utils.logging.disable_progress_bar()
            built = causal(config(**SHAPE, **extra, tie_word_embeddings=family != "llama"))
            with torch.no_grad():
                for weight in built.parameters():
                    if weight.ndim == 2:
                        weight.normal_(std=0.2)
            made[family] = tmp_path_factory.mktemp(family) / "tiny"
            built.save_pretrained(made[family])
        return made[family]

    return model
