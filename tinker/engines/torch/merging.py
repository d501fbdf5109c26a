"""An adapter merged into its base model: W + alpha / rank * B A for every adapted layer, as a plain Hugging Face model directory.

Sums are taken in fp32 and stored in the type of the base's weights. Everything else of the base (configuration, tokenizer, weights that the
adapter does not touch) is copied as it is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from tinker.engines.checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_files
from tinker.engines.engine import EngineError, Files
from tinker.engines.torch.adapters import PREFIX


def merge(base: Path, adapter: Files, target: Path) -> int:
    """Write the merged model into `target`, an empty directory; returns how many weights were changed. EngineError if the adapter does not
    fit the base model, or its weights are not safetensors."""
    check_files(adapter)
    config = json.loads(adapter[ADAPTER_CONFIG])
    scale = float(config["lora_alpha"]) / int(config["r"])
    halves = load(adapter[ADAPTER_WEIGHTS])
    down = {_weight(name): each for name, each in halves.items() if name.endswith(".lora_A.weight")}
    up = {_weight(name): each for name, each in halves.items() if name.endswith(".lora_B.weight")}
    left = set(down)
    for path in sorted(base.iterdir()):
        if path.suffix == ".safetensors":
            left -= _merge_file(path, target / path.name, down, up, scale)
        elif path.is_file():
            shutil.copyfile(path, target / path.name)
    if left or down.keys() != up.keys() or not down:
        odd = ", ".join(sorted(left | (down.keys() ^ up.keys()))[:3]) or "nothing"
        raise EngineError(
            f"the adapter adapts {odd}, which the weights in {base} do not have: it belongs to another base model"
        )
    return len(down)


def _weight(name: str) -> str:
    """The base model's name of the weight that this half of an adapter changes."""
    return name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight").replace(".lora_B.weight", ".weight")


def _merge_file(path: Path, target: Path, down: dict[str, Tensor], up: dict[str, Tensor], scale: float) -> set[str]:
    """One file of weights; returns which of them were changed."""
    merged: dict[str, Tensor] = {}
    changed = set()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                weight = file.get_tensor(name)
                if name in down and name in up:
                    weight = _merged(name, weight, down[name], up[name], scale)
                    changed.add(name)
                merged[name] = weight
    except SafetensorError as error:
        raise EngineError(f"{path} is no readable safetensors file: {error}") from error
    save_file(merged, target, metadata or {"format": "pt"})
    return changed


def _merged(name: str, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    if weight.shape != (up.shape[0], down.shape[1]):
        raise EngineError(
            f"{name} is {tuple(weight.shape)} in the base model, the adapter is for {(up.shape[0], down.shape[1])}: another one's"
        )
    share = scale * torch.mm(up.float(), down.float())
    return (weight.float() + share).to(weight.dtype).contiguous()
