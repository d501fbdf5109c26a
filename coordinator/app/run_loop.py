"""From the first barrier of a run to its last: the loop of a learner host.

It decides nothing about order: it arrives where its agents must, and goes on when the coordinator opens.
"""

from __future__ import annotations

from coordinator.app.checkpointing import attach_agents
from coordinator.app.in_step import InStep
from coordinator.app.overlap import Overlap
from coordinator.app.rundir import Exit
from coordinator.app.training import Stopped, Training
from coordinator.core.updates import lags


async def play_rounds(training: Training) -> Exit:
    """Play every round. ClientError if the coordinator is lost or ends the run; Stopped never leaves."""
    training.begin()
    try:
        await attach_agents(training)
        training.began = training.clock.now()
        await (Overlap(training) if lags(training.spec) else InStep(training)).run()
    except Stopped as stopped:
        return stopped.exit
    return Exit("finished", 0, f"all {training.spec.rounds} rounds were played")
