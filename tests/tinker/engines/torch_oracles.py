"""Independent references: the same numbers from transformers, PEFT and plain torch, one row at a time and without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load, save

from tinker.engines.engine import Files


def bare(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_adapter(folder: Path, files: Files, place: Path, *, trainable: bool = False) -> Any:
    """PEFT's own reading of the files."""
    place.mkdir(parents=True)
    for name, data in files.items():
        (place / name).write_bytes(data)
    return peft.PeftModel.from_pretrained(bare(folder), str(place), is_trainable=trainable).eval()


def logprobs(model: Any, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """0.0 for the first id, then each given those before."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
    return [0.0, *chosen[:, 0].tolist()]


def noisy(files: Files, seed: int, size: float = 0.3) -> dict[str, bytes]:
    """The same adapter with a B that is not zero."""
    noise = np.random.default_rng(seed)
    weights = load(files["adapter_model.safetensors"])
    for name in sorted(weights):
        if "lora_B" in name:
            weights[name] = noise.normal(0.0, size, weights[name].shape).astype(np.float32)
    return {**files, "adapter_model.safetensors": save(weights, metadata={"format": "pt"})}


def matrices(files: Files, kind: str = "lora_B") -> Mapping[str, np.ndarray[Any, Any]]:
    return {name: value for name, value in load(files["adapter_model.safetensors"]).items() if kind in name}
