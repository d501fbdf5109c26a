"""Adapters as files: a PEFT directory (adapter_config.json, adapter_model.safetensors) that PEFT itself loads, in and out, as bytes.

Reading copies tensors as they are: the scale stays a number beside them and is never folded in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from tinker.engines.checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_files
from tinker.engines.engine import EngineError, Files
from tinker.engines.torch.lora import Adapter, Site

PREFIX = "base_model.model."
UNSUPPORTED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
)


def adapter_files(adapter: Adapter, sites: Sequence[Site], base: str) -> dict[str, bytes]:
    """The adapter as a PEFT directory for the base model of that name. The same weights always give the same bytes."""
    tensors: dict[str, Tensor] = {}
    for site, down, up in zip(sites, adapter.down, adapter.up, strict=True):
        if down is not None and up is not None:
            tensors[f"{PREFIX}{site.path}.lora_A.weight"] = down.detach().contiguous()
            tensors[f"{PREFIX}{site.path}.lora_B.weight"] = up.detach().contiguous()
    adapted = {site.leaf for site, down in zip(sites, adapter.down, strict=True) if down is not None}
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": sorted(adapted),
        "task_type": "CAUSAL_LM",
    }
    return {
        ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True).encode(),
        ADAPTER_WEIGHTS: save(tensors, metadata={"format": "pt"}),
    }


def read_adapter(files: Files, sites: Sequence[Site], base: str) -> Adapter:
    """The adapter in these files. EngineError if they are not one, or not one for this base model."""
    config = _config(files)
    tensors = _tensors(files)
    rank = int(config["r"])
    alpha = float(config.get("lora_alpha", rank))
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    down: list[Tensor | None] = []
    up: list[Tensor | None] = []
    for site in sites:
        a = tensors.pop(f"{PREFIX}{site.path}.lora_A.weight", None)
        b = tensors.pop(f"{PREFIX}{site.path}.lora_B.weight", None)
        if a is None or b is None:
            if a is not None or b is not None:
                raise EngineError(
                    f"the adapter has only one of lora_A and lora_B for {site.path}: the file is incomplete, publish it again"
                )
            down.append(None)
            up.append(None)
            continue
        _check_shapes(site, a, b, rank, base)
        down.append(a.to(torch.float32))
        up.append(b.to(torch.float32))
    if tensors:
        raise EngineError(
            f"the adapter adapts {min(tensors)}, which {base} lacks or cannot adapt (it has {_leaves(sites)}): "
            "it belongs to another base model"
        )
    if not all(bool(tensor.isfinite().all()) for tensor in (*down, *up) if tensor is not None):
        raise EngineError(
            "the adapter holds numbers that are not finite: its training went wrong, publish an earlier version"
        )
    if not any(tensor is not None for tensor in down):
        raise EngineError(f"the adapter holds no weights; expected lora_A and lora_B for some of {_leaves(sites)}")
    return Adapter(rank=rank, alpha=alpha, down=tuple(down), up=tuple(up))


def _config(files: Files) -> dict[str, Any]:
    check_files(files)
    try:
        config: dict[str, Any] = json.loads(files[ADAPTER_CONFIG])
    except ValueError as reason:
        raise EngineError(f"{ADAPTER_CONFIG} is not JSON: {reason}") from reason
    if config.get("peft_type") != "LORA" or int(config.get("r") or 0) < 1:
        raise EngineError(
            f"expected a LORA adapter of rank >= 1, found {config.get('peft_type')} of rank {config.get('r')}"
        )
    odd = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise EngineError(f"the adapter uses {', '.join(odd)}, which this engine cannot run; train it as plain LoRA")
    return config


def _tensors(files: Files) -> dict[str, Tensor]:
    try:
        return load(files[ADAPTER_WEIGHTS])
    except Exception as reason:
        raise EngineError(f"{ADAPTER_WEIGHTS} is not a readable safetensors file: {reason}") from reason


def _check_shapes(site: Site, a: Tensor, b: Tensor, rank: int, base: str) -> None:
    expected = ((rank, site.inputs), (site.outputs, rank))
    found = (tuple(a.shape), tuple(b.shape))
    if found != expected:
        raise EngineError(
            f"the adapter's lora_A and lora_B for {site.path} are {found[0]} and {found[1]}; {base} with rank {rank} needs {expected[0]} "
            f"and {expected[1]}: it belongs to another base model"
        )


def _leaves(sites: Sequence[Site]) -> str:
    return ", ".join(dict.fromkeys(site.leaf for site in sites))
