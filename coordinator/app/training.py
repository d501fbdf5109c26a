"""One run of a learner host: it plays and evaluates what has begun, and keeps everything the run leaves behind.

When which phase begins is the business of its loops (`coordinator.app.run_loop`). The numbers of a learner live here, weights never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agents.report import BatchReport
from coordinator.app import metrics
from coordinator.app.checkpoints import Checkpoint
from coordinator.app.config import RunConfig
from coordinator.app.deliveries import unpacked
from coordinator.app.metrics import Clocked, Trained
from coordinator.app.progress import Progress
from coordinator.app.rundir import Exit, RunDirectory, blamed
from coordinator.app.updating import Agent, Bundles, Updater
from scenarios import write_recordings
from scenarios.host import Host, Production
from tinker.client import Client
from tinker.protocol.episodes import Episode
from tinker.protocol.to_coordinator import RunSpec
from tinker.protocol.to_host import CoordinatorLoad, Delivered, Opened
from tinker.protocol.values import AgentName, Edge, Ended, Phase, PolicyName
from tinker.runtime.bulk import BulkError
from tinker.runtime.clock import Clock


class Stopped(Exception):
    """The run ends before its last round; `exit` says why."""

    def __init__(self, exit: Exit) -> None:
        super().__init__(exit.detail)
        self.exit = exit


@dataclass(slots=True)
class Played:
    """A training round on its way to its rows: what was played with which versions, and by agent what became of it."""

    round: int
    episodes: Sequence[Episode]
    versions: Mapping[PolicyName, int]
    reports: dict[AgentName, BatchReport]
    measured: dict[AgentName, dict[str, float]]
    clocked: Clocked


@dataclass(slots=True)
class Training:
    """One run of one learner host. `stop` asks it to end early, keeping everything finished. `began`: when the present round did: at the
    end of the round or evaluation before. `played`: what each policy plays with in this phase. `left_out`: agents, until the round ends;
    `dropped`: episodes of this round's rollout. `model`: digest of the base model. `checkpoint`: what the run goes on from."""

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
    model: str = ""
    checkpoint: Checkpoint | None = None
    rows: list[metrics.Row] = field(default_factory=list)
    samples: list[Episode] = field(default_factory=list)
    updater: Updater = field(init=False)
    _host: Host | None = None
    _stopping: str = ""
    _engine_seen: float = 0.0
    began: float = 0.0
    clocked: Clocked = field(default_factory=Clocked)
    played: dict[PolicyName, int] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    dropped: int = 0

    def __post_init__(self) -> None:
        place = self.bundles, self.directory, self.progress
        self.updater = Updater(self.client, self.spec.run, self.config.seed, *place)

    def stop(self, reason: str) -> None:
        """Open no more turns; end after what is in hand."""
        self._stopping = reason
        if self._host is not None:
            self._host.stop(reason)

    def begin(self) -> None:
        """Be ready to play."""
        self._host = Host(self.client, self.production, self.clock.now, self._fetch)
        if self._stopping:
            self._host.stop(self._stopping)

    # --- rollout and evaluation ---

    async def play(self, start: Opened) -> list[Episode]:
        """Play the phase that has begun to its end, and record it. Stopped if the run is to end, or too many episodes failed."""
        assert self._host is not None
        round, phase, spec = start.round, start.phase, self.spec
        total = spec.groups * spec.group_size if phase == Phase.ROLLOUT else spec.evaluations
        self.played = dict(zip(start.policies, start.numbers, strict=True))
        began = self.clock.now()
        done = 0

        def count(_: Episode) -> None:
            nonlocal done
            done += 1
            self.progress.playing(done, total)

        self.progress.playing(0, total)
        left_out = partial(self.client.left_out, round, phase)
        episodes = await self._host.play(total, self.played, count, left_out)
        self._record(round, phase, episodes)
        self.check_stop()
        end = await self.opened(round, phase, Edge.END)
        self.dropped = len(end.dropped)
        if any(str(episode.episode) in end.dropped for episode in episodes):  # over at the very moment, and too late
            episodes = [episode for episode in episodes if str(episode.episode) not in end.dropped]
            self._record(round, phase, episodes)
        self.clocked.phases[phase] = self.clock.now() - began
        self._check_failures(episodes)
        return episodes

    async def _fetch(self, delivered: Delivered) -> list[Episode]:
        """What a further host has played. What cannot be fetched now is delivered again."""
        try:
            files = await self.bundles.get(delivered.bundle)
        except BulkError as error:
            self.progress.note(f"what host {delivered.host} has played could not be fetched yet: {error}")
            return []
        return unpacked(delivered, files, self.production.scenario)

    def _record(self, round: int, phase: Phase, episodes: Sequence[Episode]) -> None:
        path = self.directory.recordings_path(phase, round)
        with blamed(path):
            write_recordings(path, [episode.recording for episode in episodes])

    async def evaluate(self, start: Opened) -> None:
        """Play an evaluation that has begun, and keep its rows."""
        episodes = await self.play(start)
        playing = [(agent.role, self.played[agent.role.policy]) for agent in self.agents]
        rows = metrics.evaluation_rows(start.round, episodes, self.production.scenario, playing, self.clocked)
        self.keep(rows)

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

    # --- what is kept ---

    def keep_round(self, played: Played) -> None:
        """A round is over: keep its rows, one for each agent."""
        names = ((agent.role, agent.role.name) for agent in self.agents)
        trained = [
            Trained(role, played.versions[role.policy], played.reports[name], played.measured.get(name, {}))
            for role, name in names
        ]
        rows = [
            metrics.training_row(played.round, each, played.episodes, played.clocked, self.load) for each in trained
        ]
        self.keep(rows)
        self.samples = list(played.episodes)

    def engine(self, measured: Mapping[AgentName, Mapping[str, float]]) -> float:
        """Seconds the engine was busy since it was last asked (it tells a running total with every answer and operation)."""
        assert self._host is not None
        now = max([self._host.engine_seconds, *(each.get("engine_seconds", 0.0) for each in measured.values())])
        spent, self._engine_seen = now - self._engine_seen, max(now, self._engine_seen)
        return max(0.0, spent)

    # --- barriers ---

    async def opened(self, round: int, phase: Phase, edge: Edge) -> Opened:
        opened = await self.client.opened(round, phase, edge)
        self.clocked.waits[f"{phase}_{edge}"] = {wait.member: wait.seconds for wait in opened.waits}
        self.progress.opened(round, phase, edge, opened.waits)
        if opened.dropped:
            late = ", ".join(opened.dropped)
            agents = edge == Edge.START or phase == Phase.UPDATE
            fate = "left out of the rest of it" if agents else "dropped"
            self.progress.note(f"round {round}, {edge} of {phase}: not there in time and {fate}: {late}")
            self.left_out |= set(opened.dropped) if agents else set()
        return opened

    def check_stop(self) -> None:
        if self._stopping:
            raise Stopped(Exit("interrupted", 0, self._stopping))

    def keep(self, rows: Sequence[metrics.Row]) -> None:
        self.rows += rows
        self.directory.append(rows)
        self.progress.rows(rows)
