"""A task server whose engine keeps the whole interpreter busy for seconds, once: `slow_taskserver.py MARK SECONDS ARGUMENTS`.

The first answer waits until no other thread of Python can run meanwhile: the library call keeps the GIL. MARK is written when it is over.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from coordinator.app import processes
from coordinator.cli.main import main
from tinker.engines.engine import GenerateRequest, Generation
from tinker.engines.scripted import ScriptedEngine

MARK, SECONDS = Path(sys.argv[1]), int(sys.argv[2])


class Busy(ScriptedEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        if not MARK.exists():  # noqa: ASYNC240 (it is meant to block)
            ctypes.PyDLL(None).sleep(SECONDS)
            MARK.touch()  # noqa: ASYNC240
        return await super().generate(request)


processes.ScriptedEngine = Busy  # type: ignore[misc]
sys.argv[1:] = sys.argv[3:]
main()
