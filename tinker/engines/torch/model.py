"""Loading a base model: any causal language model of a known family, in fp32 on the CPU, with LoRA sites put in, and its card."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinker.engines.engine import EngineError
from tinker.engines.torch.lora import LoraLinear, Router, Site
from tinker.engines.torch.packed import FrozenLinear
from tinker.protocol.values import ModelCard
from tinker.tokens.errors import TokenizerError
from tinker.tokens.model_dir import model_name
from tinker.tokens.tokenizer import Tokenizer

FAMILIES = ("llama", "qwen2", "qwen3")  # rotary decoders whose attention asks its cache with `update(k, v, layer)`
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded base model: `body` gives hidden states, `head` logits. `cache_argument` is what `body` calls its cache."""

    card: ModelCard
    body: nn.Module
    head: nn.Module
    router: Router
    layers: int
    kv_heads: int
    head_dim: int
    cache_argument: str

    def hidden(self, ids: Tensor, **more: Any) -> Tensor:
        """Last hidden states [rows, tokens, hidden] of `ids` [rows, tokens]."""
        states: Tensor = self.body(input_ids=ids, **more).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.head(states)
        return logits


def load_model(name: str, max_context: int | None = None) -> Model:
    """Load from a local directory, or by hub name. EngineError if it cannot be served; see the messages."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = _folder(name)
    config = _checked_config(folder)
    if not any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        raise EngineError(
            f"no weights in {folder}: expected model.safetensors; save the model there or name another one"
        )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    causal, told = loaded
    if told["missing_keys"]:
        missing = sorted(told["missing_keys"])
        raise EngineError(
            f"{folder} lacks {len(missing)} weights that its config.json asks for, first {missing[0]}; save it again"
        )
    causal.eval().requires_grad_(False)
    vocab = int(causal.get_input_embeddings().weight.shape[0])
    tokenizer = _tokenizer(folder, vocab)
    digest = _digest(causal.named_parameters(), config)
    router = _with_sites(causal.model)
    context = int(config.max_position_embeddings)
    card = ModelCard(
        name=model_name(folder) if Path(name).is_dir() else name,
        digest=digest,
        tokenizer=tokenizer.digest if tokenizer else "",
        vocab=vocab,
        context=min(context, max_context) if max_context else context,
        eos_ids=_eos_ids(causal, tokenizer),
        lora_targets=tuple(dict.fromkeys(site.leaf for site in router.sites)),
    )
    accepted = inspect.signature(type(causal.model).forward).parameters
    return Model(
        card=card,
        body=causal.model,
        head=FrozenLinear(causal.lm_head),
        router=router,
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        cache_argument="cache" if "cache" in accepted else "past_key_values",
    )


def _folder(name: str) -> Path:
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith("."):
        raise EngineError(f"there is no model directory {name}; give a directory or a hub name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as reason:
        raise EngineError(f"model {name} is neither a directory here nor could it be fetched: {reason}") from reason


def _checked_config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise EngineError(f"no config.json in {folder}: expected the directory of a transformers model")
    family = json.loads((folder / "config.json").read_text()).get("model_type", "?")
    if family not in FAMILIES:
        raise EngineError(
            f"{folder} holds a {family} model; this engine runs {', '.join(FAMILIES)}: choose one of these"
        )
    config = AutoConfig.from_pretrained(folder)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise EngineError(f"{folder} has {', '.join(sorted(kinds))} layers; this engine runs full attention only")
    return config


def _tokenizer(folder: Path, vocab: int) -> Tokenizer | None:
    """The tokenizer beside the weights, if any; refused if it makes ids that the model cannot read."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        tokenizer = Tokenizer.from_dir(folder)
    except TokenizerError as reason:
        raise EngineError(f"the tokenizer of {folder} cannot be read: {reason}") from reason
    if tokenizer.vocab > vocab:
        raise EngineError(
            f"the tokenizer of {folder} has {tokenizer.vocab} ids but the model embeds {vocab}: resize the embedding and save it again"
        )
    return tokenizer


def _digest(parameters: Iterable[tuple[str, nn.Parameter]], config: Any) -> str:
    """sha256 over configuration and weights; where the files lay and which release wrote them does not count."""
    told = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("_") and key != "transformers_version"
    }
    total = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, value in parameters:
        total.update(f"{name} {tuple(value.shape)}\n".encode())
        total.update(value.detach().contiguous().numpy().data)
    return total.hexdigest()


def _with_sites(body: nn.Module) -> Router:
    """Replace every linear layer of the decoder by one that can carry adapters."""
    found = [
        (f"{parent}.{leaf}", module, leaf, child)
        for parent, module in body.named_modules()
        for leaf, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    router = Router(
        [Site(f"model.{path}", leaf, child.in_features, child.out_features) for path, _, leaf, child in found]
    )
    for number, (_, module, leaf, child) in enumerate(found):
        setattr(module, leaf, LoraLinear(child, number, router))
    return router


def _eos_ids(causal: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    found: set[int] = set(tokenizer.eos_ids if tokenizer else ())
    for source in (causal.generation_config, causal.config):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))
