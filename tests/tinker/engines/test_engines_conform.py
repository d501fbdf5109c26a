"""Both engines pass the conformance suite."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.tinker.engines.conformance import CHECKS
from tinker.engines.engine import Engine
from tinker.engines.scripted import ScriptedEngine

Check = Callable[[Engine], Awaitable[None]]
every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
async def test_the_scripted_engine(check: Check) -> None:
    async with ScriptedEngine(replies=[[7, 8, 9, 2], [6, 6, 6, 6, 6, 6, 6, 2], [5, 2]]) as engine:
        await check(engine)


@pytest.mark.train
@every_check
async def test_the_torch_engine(check: Check, tiny: Callable[[str], Path]) -> None:
    model = tiny("qwen3")
    from tinker.engines.torch import TorchEngine

    async with TorchEngine(str(model), slots=16) as engine:
        await check(engine)
