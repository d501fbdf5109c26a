"""A policy's whole training state as files: tensors, and a manifest that says whose they are and has their digest.

What the tensors are is the engine's affair. A state is read by the engine that wrote it, on the base model it was trained on, and only as a
whole: torn, changed or foreign files are refused with what was found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tinker.engines.engine import EngineError, Files
from tinker.protocol.values import ModelCard

STATE_MANIFEST = "state.json"
STATE_TENSORS = "state.safetensors"
FORMAT = 1


def sealed(engine: str, card: ModelCard, facts: Mapping[str, object], tensors: bytes) -> Files:
    """The files of a state. `facts` is what the engine needs besides the tensors, as JSON can hold it. Equal states give equal bytes."""
    manifest = {
        "format": FORMAT,
        "engine": engine,
        "base": card.name,
        "base_digest": card.digest,
        "facts": dict(facts),
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "size": len(tensors),
    }
    return {STATE_MANIFEST: json.dumps(manifest, indent=2, sort_keys=True).encode(), STATE_TENSORS: tensors}


def opened(files: Files, engine: str, card: ModelCard) -> tuple[dict[str, Any], bytes]:
    """The facts and the tensors again. EngineError names what is missing, damaged, or of another engine or base model."""
    for name in (STATE_MANIFEST, STATE_TENSORS):
        if name not in files:
            there = ", ".join(sorted(files)) or "no files"
            raise EngineError(f"a state needs {STATE_MANIFEST} and {STATE_TENSORS}; got {there}: save it again")
    try:
        manifest = json.loads(files[STATE_MANIFEST])
        found = (manifest["format"], manifest["engine"], manifest["base_digest"])
        facts, digest = dict(manifest["facts"]), str(manifest["sha256"])
    except (ValueError, TypeError, KeyError) as reason:
        raise EngineError(
            f"{STATE_MANIFEST} is no manifest of a state ({type(reason).__name__}: {reason}): use an older checkpoint"
        ) from reason
    expected = (FORMAT, engine, card.digest)
    if found != expected:
        raise EngineError(
            f"the state is of format {found[0]}, engine {found[1]} and base model {manifest.get('base')} ({str(found[2])[:12]}); here are "
            f"format {FORMAT}, engine {engine} and {card.name} ({card.digest[:12]}): resume on what it was trained with"
        )
    tensors = files[STATE_TENSORS]
    if (real := hashlib.sha256(tensors).hexdigest()) != digest:
        raise EngineError(
            f"{STATE_TENSORS} is damaged: {len(tensors)} bytes of digest {real[:12]}, expected {manifest.get('size')} of {digest[:12]}; "
            "use an older checkpoint"
        )
    return facts, tensors
