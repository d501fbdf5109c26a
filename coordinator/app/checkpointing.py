"""What a run's loop does about checkpoints: begin from one, and keep one when a round is over."""

from __future__ import annotations

from functools import partial

from coordinator.app.at_once import at_once
from coordinator.app.checkpoints import Checkpoint, Manifest, Place, packed
from coordinator.app.rundir import Exit
from coordinator.app.training import Stopped, Training
from coordinator.app.updating import Agent
from tinker.client import OperationError
from tinker.engines.engine import Files
from tinker.protocol.operations import Lost
from tinker.protocol.values import AgentName


async def attach_agents(training: Training) -> None:
    """Every agent gets its weights: fresh ones, or those of the checkpoint."""
    checkpoint = training.checkpoint
    for agent in training.agents:
        if checkpoint is None:
            await training.updater.attach(agent)
        else:
            name = agent.role.name
            await training.updater.restore(agent, checkpoint.manifest.places[name], checkpoint.states[name])


async def keep_checkpoint(training: Training, round: int) -> None:
    """What it takes to go on after this round is kept, if it is due: also after the last one, so that more can be played. An agent that was
    left out of its update is between two versions: then the next round's has to do."""
    every = training.config.checkpoint_every
    due = round > 0 and every > 0 and (round % every == 0 or round == training.spec.rounds)
    if not due or any(agent.fenced for agent in training.agents):
        return
    kept: dict[AgentName, tuple[Place, Files]] = {}

    async def save(agent: Agent) -> None:
        kept[agent.role.name] = await training.updater.save(agent)

    try:
        await at_once([partial(save, agent) for agent in training.agents])
    except OperationError as error:
        training.progress.note(f"no checkpoint of round {round}: {error}")
        return
    names = [agent.role.name for agent in training.agents]
    manifest = Manifest(round, training.model, training.directory.written, {name: kept[name][0] for name in names})
    training.directory.save_checkpoint(packed(Checkpoint(manifest, {name: kept[name][1] for name in names})))


def check_held(agent: Agent, error: OperationError) -> None:
    """Stopped if nobody holds what the agent has learned: it cannot be updated any more."""
    if error.lost == Lost.POLICY:
        how = "go on with it by `opentinker run --resume`, and start task servers with --state"
        raise Stopped(
            Exit("policy lost", 3, f"nobody holds what {agent.role.name} has learned ({error}): {how}")
        ) from error
