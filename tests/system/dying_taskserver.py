"""`opentinker taskserver` that ends itself with SIGKILL at a chosen point of its work.

`python dying_taskserver.py POINT COUNT ARGUMENTS...`: the COUNT-th time that it comes to POINT.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from coordinator.app import processes
from coordinator.app.processes import TaskServerSettings
from coordinator.cli.main import main
from tinker.engines.engine import Engine, Files
from tinker.engines.scripted import ScriptedEngine
from tinker.pools.commits import DiskCommits
from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, LossSpec, PolicyName
from tinker.tokens import Tokenizer


class Fate:
    """Counts how often a point was reached."""

    point, left = "", 0

    @classmethod
    def at(cls, point: str) -> None:
        if point == cls.point:
            cls.left -= 1
            if cls.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Mortal(ScriptedEngine):
    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        Fate.at("gradient")
        done = await super().forward_backward(policy, rows, loss)
        Fate.at("gradient done")
        return done

    async def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        Fate.at("step")
        done = await super().optim_step(policy, adam)
        Fate.at("step done")
        return done

    async def publish(self, policy: PolicyName) -> Files:
        Fate.at("publish")
        return await super().publish(policy)


class MortalCommits(DiskCommits):
    def write(self, policy: PolicyName, number: int, files: Mapping[str, bytes]) -> None:
        super().write(policy, number, files)
        Fate.at("committed")


def engine(settings: TaskServerSettings, tokenizer: Tokenizer) -> Engine:
    made = right(settings, tokenizer)
    assert isinstance(made, ScriptedEngine)
    return Mortal(made._card, made._replies)


if __name__ == "__main__":
    Fate.point, Fate.left = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    right = processes._training_engine
    processes._training_engine = engine
    processes.DiskCommits = MortalCommits  # type: ignore[misc]
    main()
