"""These tests need a real SGLang server, two gigabytes and some minutes: `make test-sglang` collects them, `make test` does not.

One server for all of them, started by the engine itself. The engine lives in a task of its own, because a fixture must not yield inside a
task group.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

PYTHON = os.environ.get("OPENTINKER_SGLANG_PYTHON", "")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]

if PYTHON:
    from tinker.engines.sglang import Launch, Servers, SglangEngine
    from tinker.engines.torch import TorchEngine
    from tinker.models import DEMO

    @pytest_asyncio.fixture(scope="session", loop_scope="session")
    async def engine(tmp_path_factory: object) -> AsyncIterator[SglangEngine]:
        """Serves and trains the demo model."""
        launch = Launch(python=PYTHON, ready=900.0, tokens=16384, restarts=5)
        made = SglangEngine(Servers(launch=launch, drain=2.0), TorchEngine(str(DEMO)), model=Path(DEMO))
        up, done = asyncio.Event(), asyncio.Event()

        async def live() -> None:
            async with made:
                up.set()
                await done.wait()

        task = asyncio.create_task(live())
        await asyncio.wait([task, asyncio.create_task(up.wait())], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield made
        done.set()
        await task
