"""The run loop of a learner host: barrier by barrier, it plays, learns and evaluates, and keeps everything the run leaves behind.

It decides nothing about order: it arrives where its agents must, and goes on when the coordinator opens. The numbers of a learner live
here, weights never do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from agents.learner import Batch
from coordinator.app import metrics
from coordinator.app.config import RunConfig
from coordinator.app.metrics import Clocked, Trained
from coordinator.app.progress import ARRIVED, Progress
from coordinator.app.rundir import Exit, RunDirectory, blamed
from coordinator.app.updating import Agent, Bundles, Updater
from coordinator.core.order import due
from coordinator.core.rounds import phases
from scenarios import write_recordings
from scenarios.host import Host, Production, held_out
from tinker.client import Client, OperationError
from tinker.protocol.episodes import Episode
from tinker.protocol.to_coordinator import Arrivals, Arrive, RunSpec
from tinker.protocol.to_host import CoordinatorLoad, Opened
from tinker.protocol.values import AgentName, Edge, Ended, Phase, PolicyName
from tinker.runtime.clock import Clock


class Stopped(Exception):
    """The run ends before its last round; `exit` says why."""

    def __init__(self, exit: Exit) -> None:
        super().__init__(exit.detail)
        self.exit = exit


@dataclass(slots=True)
class Training:
    """One run of one learner host. `run` plays it to its end; `stop` asks it to end early, keeping everything finished."""

    client: Client
    spec: RunSpec
    config: RunConfig
    production: Production
    agents: tuple[Agent, ...]
    bundles: Bundles
    directory: RunDirectory
    progress: Progress
    clock: Clock
    load: CoordinatorLoad | None = None
    rows: list[metrics.Row] = field(default_factory=list)
    samples: list[Episode] = field(default_factory=list)
    _updater: Updater = field(init=False)
    _host: Host | None = None
    _stopping: str = ""
    _engine_seen: float = 0.0
    _began: float = 0.0  # when the present round began: the end of the round or evaluation before
    _clocked: Clocked = field(default_factory=Clocked)
    _episodes: list[Episode] = field(default_factory=list)
    _played: dict[PolicyName, int] = field(default_factory=dict)  # what each policy plays with in this phase
    _left_out: set[str] = field(default_factory=set)  # agents, until the round ends
    _dropped: int = 0  # episodes of this round's rollout

    def __post_init__(self) -> None:
        place = self.bundles, self.directory, self.progress
        self._updater = Updater(self.client, self.spec.run, self.config.seed, *place)

    def stop(self, reason: str) -> None:
        """Open no more turns; end after what is in hand."""
        self._stopping = reason
        if self._host is not None:
            self._host.stop(reason)

    async def run(self) -> Exit:
        """Play every round. ClientError if the coordinator is lost or ends the run; Stopped never leaves."""
        self._host = Host(self.client, self.production, self.clock.now)
        if self._stopping:
            self._host.stop(self._stopping)
        try:
            for agent in self.agents:
                await self._updater.attach(agent)
            self._began = self.clock.now()
            for round in range(self.spec.rounds + 1):
                for phase in phases(self.spec, round):
                    await self._phase(round, phase)
        except Stopped as stopped:
            return stopped.exit
        return Exit("finished", 0, f"all {self.spec.rounds} rounds were played")

    async def _phase(self, round: int, phase: Phase) -> None:
        self._check_stop()
        if phase == phases(self.spec, round)[0]:
            self._left_out = set()
        if phase == Phase.ROLLOUT:
            self._clocked = Clocked()
            self._engine({})  # what it did since the last round belongs to no round
            self._episodes = await self._play(round, phase, self.spec.groups * self.spec.group_size)
        elif phase == Phase.UPDATE:
            await self._update(round, self._episodes)
        else:
            self._clocked = Clocked()
            await self._evaluate(round)
            self._began = self.clock.now()

    # --- rollout and evaluation ---

    async def _play(self, round: int, phase: Phase, total: int) -> list[Episode]:
        assert self._host is not None
        start = await self._pass(round, phase, Edge.START)
        self._played = dict(zip(start.policies, start.numbers, strict=True))
        began = self.clock.now()
        done = 0

        def count(_: Episode) -> None:
            nonlocal done
            done += 1
            self.progress.playing(done, total)

        self.progress.playing(0, total)
        left_out = partial(self.client.left_out, round, phase)
        episodes = await self._host.play(total, self._played, count, left_out)
        self._record(round, phase, episodes)
        self._check_stop()
        end = await self._opened(round, phase, Edge.END)
        self._dropped = len(end.dropped)
        if any(str(episode.episode) in end.dropped for episode in episodes):  # over at the very moment, and too late
            episodes = [episode for episode in episodes if str(episode.episode) not in end.dropped]
            self._record(round, phase, episodes)
        self._clocked.phases[phase] = self.clock.now() - began
        self._check_failures(episodes)
        return episodes

    def _record(self, round: int, phase: Phase, episodes: Sequence[Episode]) -> None:
        path = self.directory.recordings_path(phase, round)
        with blamed(path):
            write_recordings(path, [episode.recording for episode in episodes])

    async def _evaluate(self, round: int) -> None:
        episodes = await self._play(round, Phase.EVALUATE, len(held_out(self.production.scenario)))
        playing = [(agent.role, self._played[agent.role.policy]) for agent in self.agents]
        rows = metrics.evaluation_rows(round, episodes, self.production.scenario, playing, self._clocked)
        self._keep(rows)

    def _check_failures(self, episodes: Sequence[Episode]) -> None:
        failed = [episode for episode in episodes if episode.ended == Ended.FAILED]
        for episode in failed[:1]:
            last = episode.recording.reason.strip().splitlines()[-1]
            self.progress.note(f"{len(failed)} of {len(episodes)} episodes failed; {episode.episode}: {last}")
        if len(failed) > self.config.max_failed_episodes * len(episodes):
            raise Stopped(
                Exit(
                    "too many failed episodes",
                    1,
                    f"{len(failed)} of {len(episodes)} episodes failed, allowed are {self.config.max_failed_episodes:.0%} "
                    f"(max_failed_episodes). The first failure:\n{failed[0].recording.reason}",
                )
            )

    # --- update ---

    async def _update(self, round: int, episodes: Sequence[Episode]) -> None:
        batches = {
            agent.role.name: agent.learner.batch([] if agent.role.name in self._left_out else episodes, agent.version)
            for agent in self.agents
        }
        played = self._played
        samples = {name: len(batch.rows) for name, batch in batches.items()}
        await self._pass(round, Phase.UPDATE, Edge.START, samples)
        began = self.clock.now()
        measured: dict[AgentName, dict[str, float]] = {}
        await _at_once(
            [partial(self._update_agent, round, agent, batches[agent.role.name], measured) for agent in self.agents]
        )
        end = await self._opened(round, Phase.UPDATE, Edge.END)
        for agent in self.agents:
            agent.fenced |= agent.role.name in end.dropped and bool(batches[agent.role.name].rows)
            own = measured.setdefault(agent.role.name, {})
            if agent.role.name in self._left_out:
                own["count/left_out"] = 1.0
            if self._dropped:
                own["count/dropped_episodes"] = float(self._dropped)
        self._clocked.phases[Phase.UPDATE] = self.clock.now() - began
        self._clocked.engine = self._engine(measured)
        self._clocked.round, self._began = self.clock.now() - self._began, self.clock.now()
        rows = [
            metrics.training_row(
                round,
                Trained(
                    agent.role,
                    played[agent.role.policy],
                    batches[agent.role.name].report,
                    measured.get(agent.role.name, {}),
                ),
                episodes,
                self._clocked,
                self.load,
            )
            for agent in self.agents
        ]
        self._keep(rows)
        self.samples = list(episodes)

    async def _update_agent(
        self, round: int, agent: Agent, batch: Batch, measured: dict[AgentName, dict[str, float]]
    ) -> None:
        spec = next(each for each in self.spec.agents if each.name == agent.role.name)
        if agent.role.name in self._left_out:
            return
        if due(spec, round, len(batch.rows)):
            try:
                await self.client.may_update(round, agent.role.name)
                measured[agent.role.name] = await self._updater.learn(agent, batch.rows)
            except OperationError as error:
                self.progress.note(
                    f"{agent.role.name} was not updated in round {round} and keeps version {agent.version}: {error}"
                )
                measured[agent.role.name] = {"count/refused_updates": 1.0}
        elif not batch.rows and batch.report.reason:
            self.progress.note(f"round {round}, {agent.role.name}: {batch.report.reason}")
        at = round, Phase.UPDATE, Edge.END
        await self.client.arrive(Arrive(self.spec.run, *at, agent.role.name, agent.version, digest=agent.digest))
        self.progress.updating(agent.role.name, ARRIVED)

    def _engine(self, measured: Mapping[AgentName, Mapping[str, float]]) -> float:
        """Seconds the engine was busy since it was last asked (it tells a running total with every answer and operation)."""
        assert self._host is not None
        now = max([self._host.engine_seconds, *(each.get("engine_seconds", 0.0) for each in measured.values())])
        spent, self._engine_seen = now - self._engine_seen, max(now, self._engine_seen)
        return max(0.0, spent)

    # --- barriers ---

    async def _pass(
        self, round: int, phase: Phase, edge: Edge, samples: Mapping[AgentName, int] | None = None
    ) -> Opened:
        """Arrive with every agent of this round and wait until the barrier opens."""
        here = [agent for agent in self.agents if agent.role.name not in self._left_out]
        names = tuple(agent.role.name for agent in here)
        versions = tuple(agent.version for agent in here)
        counts = tuple(samples[name] for name in names) if samples else ()
        digests = tuple(agent.digest for agent in here)
        await self.client.arrive(Arrivals(self.spec.run, round, phase, edge, names, versions, counts, digests))
        return await self._opened(round, phase, edge)

    async def _opened(self, round: int, phase: Phase, edge: Edge) -> Opened:
        opened = await self.client.opened(round, phase, edge)
        self._clocked.waits[f"{phase}_{edge}"] = {wait.member: wait.seconds for wait in opened.waits}
        self.progress.opened(round, phase, edge, opened.waits)
        if opened.dropped:
            late = ", ".join(opened.dropped)
            agents = edge == Edge.START or phase == Phase.UPDATE
            fate = "left out of the rest of it" if agents else "dropped"
            self.progress.note(f"round {round}, {edge} of {phase}: not there in time and {fate}: {late}")
            self._left_out |= set(opened.dropped) if agents else set()
        return opened

    def _check_stop(self) -> None:
        if self._stopping:
            raise Stopped(Exit("interrupted", 0, self._stopping))

    def _keep(self, rows: Sequence[metrics.Row]) -> None:
        self.rows += rows
        self.directory.append(rows)
        self.progress.rows(rows)


async def _at_once(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Make them all at once. The first that fails ends the others, and its exception is raised as it is (not in a group)."""
    failures: list[Exception] = []

    async def guarded(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(guarded, call)
    if failures:
        raise failures[0]
