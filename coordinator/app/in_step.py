"""The loop of a run whose agents are in step: rollout, update and evaluation one after the other, a barrier before and after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agents.learner import Batch
from coordinator.app.at_once import at_once
from coordinator.app.checkpointing import check_held, keep_checkpoint
from coordinator.app.metrics import Clocked
from coordinator.app.progress import ARRIVED
from coordinator.app.training import Played, Training
from coordinator.app.updating import Agent
from coordinator.core.order import due
from coordinator.core.rounds import phases
from tinker.client import OperationError
from tinker.protocol.episodes import Episode
from tinker.protocol.to_coordinator import Arrivals, Arrive
from tinker.protocol.to_host import Opened
from tinker.protocol.values import AgentName, Edge, Phase


@dataclass(slots=True)
class InStep:
    """Nobody goes on before everybody has come."""

    training: Training
    _episodes: list[Episode] = field(default_factory=list)

    async def run(self) -> None:
        """Stopped when the run is to end early."""
        spec = self.training.spec
        for round in range(spec.done + 1 if spec.done else 0, spec.rounds + 1):
            for phase in phases(spec, round):
                await self._phase(round, phase)
            await keep_checkpoint(self.training, round)

    async def _phase(self, round: int, phase: Phase) -> None:
        training = self.training
        training.check_stop()
        if phase == phases(training.spec, round)[0]:
            training.left_out = set()
        if phase == Phase.ROLLOUT:
            training.clocked = Clocked()
            training.engine({})  # what it did since the last round belongs to no round
            self._episodes = await training.play(await self._pass(round, phase, Edge.START))
        elif phase == Phase.UPDATE:
            await self._update(round, self._episodes)
        else:
            training.clocked = Clocked()
            await training.evaluate(await self._pass(round, phase, Edge.START))
            training.began = training.clock.now()

    async def _update(self, round: int, episodes: Sequence[Episode]) -> None:
        training = self.training
        agents, left_out, clock = training.agents, training.left_out, training.clock
        batches = {
            agent.role.name: agent.learner.batch([] if agent.role.name in left_out else episodes, agent.version)
            for agent in agents
        }
        played = training.played
        await self._pass(round, Phase.UPDATE, Edge.START, {name: len(batch.rows) for name, batch in batches.items()})
        began = clock.now()
        measured: dict[AgentName, dict[str, float]] = {}
        await at_once(
            [partial(self._update_agent, round, agent, batches[agent.role.name], measured) for agent in agents]
        )
        end = await training.opened(round, Phase.UPDATE, Edge.END)
        for agent in agents:
            agent.fenced |= agent.role.name in end.dropped and bool(batches[agent.role.name].rows)
            own = measured.setdefault(agent.role.name, {})
            if agent.role.name in left_out:
                own["count/left_out"] = 1.0
            if training.dropped:
                own["count/dropped_episodes"] = float(training.dropped)
        clocked = training.clocked
        clocked.phases[Phase.UPDATE] = clock.now() - began
        clocked.engine = training.engine(measured)
        clocked.round, training.began = clock.now() - training.began, clock.now()
        reports = {name: batch.report for name, batch in batches.items()}
        training.keep_round(Played(round, episodes, played, reports, measured, clocked))

    async def _update_agent(
        self, round: int, agent: Agent, batch: Batch, measured: dict[AgentName, dict[str, float]]
    ) -> None:
        training, name = self.training, agent.role.name
        spec = next(each for each in training.spec.agents if each.name == name)
        if name in training.left_out:
            return
        if due(spec, round, len(batch.rows)):
            try:
                await training.client.may_update(round, name)
                measured[name] = await training.updater.learn(agent, batch.rows)
            except OperationError as error:
                check_held(agent, error)
                training.progress.note(
                    f"{name} was not updated in round {round} and keeps version {agent.version}: {error}"
                )
                measured[name] = {"count/refused_updates": 1.0}
        elif not batch.rows and batch.report.reason:
            training.progress.note(f"round {round}, {name}: {batch.report.reason}")
        at = round, Phase.UPDATE, Edge.END
        await training.client.arrive(Arrive(training.spec.run, *at, name, agent.version, digest=agent.digest))
        training.progress.updating(name, ARRIVED)

    async def _pass(
        self, round: int, phase: Phase, edge: Edge, samples: Mapping[AgentName, int] | None = None
    ) -> Opened:
        """Arrive with every agent of this round and wait until the barrier opens."""
        training = self.training
        here = [agent for agent in training.agents if agent.role.name not in training.left_out]
        names = tuple(agent.role.name for agent in here)
        versions = tuple(agent.version for agent in here)
        counts = tuple(samples[name] for name in names) if samples else ()
        digests = tuple(agent.digest for agent in here)
        at = round, phase, edge
        await training.client.arrive(Arrivals(training.spec.run, *at, names, versions, counts, digests))
        return await training.opened(*at)
