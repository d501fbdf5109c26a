"""Engines on stub servers, for the tests of what the SGLang engine does when servers misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.tinker.engines.sglang_stub import Stub
from tinker.engines.engine import Files
from tinker.engines.scripted import ScriptedEngine
from tinker.engines.sglang import Servers, SglangEngine
from tinker.engines.sglang.replica import State

QUICKLY: dict[str, Any] = {"watch": 0.02, "pause": 0.001, "drain": 0.05, "join": 5.0}


@asynccontextmanager
async def serving(*stubs: Stub, **settings: Any) -> AsyncIterator[SglangEngine]:
    """The engine on these stubs, which listen meanwhile."""
    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub)
        yield await stack.enter_async_context(engine_on(*stubs, **settings))


def engine_on(*stubs: Stub, probe: bool = False, **settings: Any) -> SglangEngine:
    """Not entered yet; the stubs listen already."""
    servers = Servers(tuple(stub.url for stub in stubs), **{**QUICKLY, **settings})
    return SglangEngine(servers, ScriptedEngine(), probe=probe)


def adapter(number: int = 0) -> Files:
    """Files of a PEFT directory, others for every number."""
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    weights = save({"base_model.model.q_proj.lora_A.weight": np.full((1, 4), number, np.float32)})
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": weights}


def whole_model(number: int = 0) -> Files:
    """Files of a checkpoint."""
    return {"config.json": b"{}", "model.safetensors": save({"weight": np.full((2, 4), number, np.float32)})}


async def until(true: Callable[[], object]) -> None:
    """Wait for something that other tasks bring about; the test's own time limit ends it."""
    while not true():  # noqa: ASYNC110 (nobody tells us)
        await asyncio.sleep(0.001)


def states(engine: SglangEngine) -> list[State]:
    return [replica.state for replica in engine.replicas]
