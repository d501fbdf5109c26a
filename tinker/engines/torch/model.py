"""Loading a base model: any causal language model whose numbers come out right here, with LoRA sites put in, and its card."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
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

WEIGHT_FILES = ("*.safetensors", "*.bin")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded base model: `body` gives hidden states, `head` logits. `cache_argument` is what `body` calls its cache. `batched`: whether
    rows of any mix may share a forward (see `suitable`); else it answers one request at a time, and `why` says why."""

    card: ModelCard
    causal: Any
    body: nn.Module
    head: nn.Module
    router: Router
    layers: int
    kv_heads: int
    head_dim: int
    cache_argument: str
    device: torch.device
    dtype: torch.dtype
    batched: bool = True
    why: str = ""

    def hidden(self, ids: Tensor, **more: Any) -> Tensor:
        """Last hidden states [rows, tokens, hidden] of `ids` [rows, tokens]."""
        states: Tensor = self.body(input_ids=ids, **more).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """In fp32, whatever the model computes in."""
        logits: Tensor = self.head(states)
        return logits.float()


def load_model(name: str, max_context: int | None = None, device: str = "auto", dtype: str = "auto") -> Model:
    """Load from a local directory, or by hub name. EngineError if it cannot be served; see the messages."""
    where, precision = _placed(device, dtype)
    folder = _folder(name)
    causal, config = _loaded(folder, precision)
    causal.eval().requires_grad_(False)
    vocab = int(causal.get_input_embeddings().weight.shape[0])
    tokenizer = _tokenizer(folder, vocab)
    digest = _digest(causal.named_parameters(), config)
    causal.to(where)
    body = causal.base_model
    router = _with_sites(body, causal.base_model_prefix)
    if not router.sites:
        raise EngineError(f"{folder} has no linear layers that adapters could be put on; choose another model")
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
    accepted = inspect.signature(type(body).forward).parameters
    heads = int(config.num_attention_heads)
    model = Model(
        card=card,
        causal=causal,
        body=body,
        head=FrozenLinear(causal.get_output_embeddings()),
        router=router,
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        cache_argument="cache" if "cache" in accepted else "past_key_values",
        device=where,
        dtype=precision,
    )
    return _suited(model, config)


def _suited(model: Model, config: Any) -> Model:
    """The model in the fastest way that gives its own numbers."""
    from tinker.engines.torch.suitable import disagreement, reason_against_batching

    why = reason_against_batching(config) or disagreement(model)
    if not why:
        return model
    plain = replace(model, batched=False, why=why)
    wrong = disagreement(plain)
    if wrong:
        raise EngineError(f"this engine cannot run {model.card.name}: {why}; and by itself, {wrong}")
    logging.getLogger(__name__).warning(
        "%s answers one request at a time and keeps nothing between turns, because %s", model.card.name, why
    )
    return plain


def _placed(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """`auto` is the first GPU if torch sees one; there bfloat16, on the CPU float32."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except Exception as reason:  # torch raises what its build happens to raise
        told = (str(reason).strip().splitlines() or ["no reason given"])[0]
        raise EngineError(f"device {device!r} cannot be used ({told}); give cpu, cuda, cuda:1 or auto") from reason
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise EngineError(f"dtype is {dtype!r}; give {', '.join(DTYPES)} or auto")
    return where, DTYPES[dtype]


def _loaded(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as progress

    if not (folder / "config.json").is_file():
        raise EngineError(f"no config.json in {folder}: expected the directory of a transformers model")
    if not any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        raise EngineError(
            f"no weights in {folder}: expected model.safetensors; save the model there or name another one"
        )
    progress.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (ValueError, KeyError, ImportError) as reason:
        family = json.loads((folder / "config.json").read_text()).get("model_type", "?")
        told = (str(reason).strip().splitlines() or ["no reason given"])[0]
        raise EngineError(
            f"{folder} holds a {family} model, which transformers cannot load here ({told}); choose a Llama, Qwen2 or Qwen3"
        ) from reason
    causal, told = loaded
    if told["missing_keys"]:
        missing = sorted(told["missing_keys"])
        raise EngineError(
            f"{folder} lacks {len(missing)} weights that its config.json asks for, first {missing[0]}; save it again"
        )
    return causal, config


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
        total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _with_sites(body: nn.Module, prefix: str) -> Router:
    """Replace every linear layer of the decoder by one that can carry adapters."""
    found = [
        (f"{parent}.{leaf}", module, leaf, child)
        for parent, module in body.named_modules()
        for leaf, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    router = Router(
        [Site(f"{prefix}.{path}", leaf, child.in_features, child.out_features) for path, _, leaf, child in found]
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
