"""The SGLang engine passes the conformance suite, with servers that have no model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.tinker.engines.conformance import CHECKS
from tests.tinker.engines.sglang_stub import Stub
from tinker.engines.engine import Engine
from tinker.engines.scripted import ScriptedEngine
from tinker.engines.sglang import Servers, SglangEngine

Check = Callable[[Engine], Awaitable[None]]
every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
async def test_with_scripted_updates(check: Check) -> None:
    async with (
        Stub() as one,
        Stub() as two,
        SglangEngine(Servers((one.url, two.url)), ScriptedEngine(), probe=False) as engine,
    ):
        await check(engine)


@pytest.mark.train
@every_check
async def test_with_updates_by_torch(check: Check, tiny: Callable[[str], Path]) -> None:
    model = tiny("qwen3")
    from tinker.engines.torch import TorchEngine

    async with (
        Stub(context=128) as stub,
        SglangEngine(Servers((stub.url,)), TorchEngine(str(model), slots=16), probe=False) as engine,
    ):
        await check(engine)
