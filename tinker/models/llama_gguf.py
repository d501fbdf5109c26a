"""A Llama model in a GGUF file, written out as the directory of a transformers model: fp32 weights, configuration, tokenizer, template.

The names of the tensors change, and the rows of the query and key projections: ggml rotates pairs of neighbours, transformers the two
halves of a head. Only models whose embedding is also the output layer and whose tokenizer is byte-level BPE with its digits split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tinker.models.gguf import Floats, Gguf, GgufError

WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL = 3  # the type of a token that is never text


def write_model(gguf: Gguf, folder: Path) -> None:
    """Fill the directory, which exists and is empty; GgufError if this is another kind of model."""
    told = gguf.metadata
    kind = (told.get("general.architecture"), told.get("tokenizer.ggml.model"), told.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise GgufError(f"the file holds a model of kind {kind}; expected a Llama with SmolLM's tokenizer")
    heads = {"attn_q": int(told["llama.attention.head_count"]), "attn_k": int(told["llama.attention.head_count_kv"])}
    weights = {_name(name): _rows(name, tensor, heads) for name, tensor in gguf.tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(told))
    _write(folder / "generation_config.json", {"eos_token_id": int(told["tokenizer.ggml.eos_token_id"])})
    _write(folder / "tokenizer_config.json", _tokenizer_config(told))
    _tokenizer(told).save(str(folder / "tokenizer.json"))


def _name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    block, layer, part, kind = (*name.split("."), "", "", "")[:4]
    if block != "blk" or part not in OF_LAYER or kind != "weight":
        raise GgufError(f"the file holds a tensor {name}, which a Llama with a shared embedding has not")
    return f"model.layers.{layer}.{OF_LAYER[part]}.weight"


def _rows(name: str, tensor: Floats, heads: dict[str, int]) -> Floats:
    """Rows of a rotated projection in transformers' order: [heads, pairs, 2] becomes [heads, 2, pairs]."""
    count = next((count for part, count in heads.items() if f".{part}." in name), 0)
    if not count:
        return tensor
    return np.ascontiguousarray(tensor.reshape(count, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape))


def _config(told: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = int(told["llama.embedding_length"]), int(told["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(told["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(told["llama.feed_forward_length"]),
        "num_hidden_layers": int(told["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(told["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(told["llama.context_length"]),
        "rms_norm_eps": round(float(told["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(told["llama.rope.freq_base"])},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": int(told["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(told["tokenizer.ggml.eos_token_id"]),
        "dtype": "float32",
    }


def _tokenizer(told: dict[str, Any]) -> Tokenizer:
    tokens, merges = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = told["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(told: dict[str, Any]) -> dict[str, Any]:
    tokens = told["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    roles = {f"{role}_token": tokens[told[f"tokenizer.ggml.{key}_token_id"]] for role, key in named.items()}
    return {**roles, "chat_template": told["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"}


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
