"""The loop of a run whose agents may lag: rollouts go on while updates run, each agent at its own pace.

One task plays the rounds; each agent has one that updates it, round after round. An agent comes to a rollout when its update of
`max_lag` + 1 rounds ago has ended, with the newest version that is loaded everywhere; to an evaluation when every update has ended. Nothing
else connects the two. A round's rows are kept when every agent's update of it has ended, in the order of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from coordinator.app.at_once import at_once
from coordinator.app.checkpointing import check_held
from coordinator.app.metrics import Clocked
from coordinator.app.progress import ARRIVED
from coordinator.app.training import Played, Stopped, Training
from coordinator.app.updating import Agent
from coordinator.core.order import due
from coordinator.core.rounds import phases
from tinker.client import OperationError
from tinker.protocol.batches import Row
from tinker.protocol.episodes import Episode
from tinker.protocol.to_coordinator import AgentSpec, Arrivals, Arrive
from tinker.protocol.to_host import Opened
from tinker.protocol.values import AgentName, Edge, Phase


@dataclass(slots=True)
class Round:
    """A round whose rollout has ended. `closed`: what followed it has begun, so that its time is known."""

    played: Played
    closed: bool = False


@dataclass(slots=True)
class Pace:
    """How far one agent is. `rounds`: those whose update of it has not ended, oldest first. `version`: the newest that is loaded
    everywhere, with the digest of its adapter."""

    agent: Agent
    spec: AgentSpec
    queue: MemoryObjectSendStream[Round]
    given: MemoryObjectReceiveStream[Round]
    rounds: list[int] = field(default_factory=list)
    version: tuple[int, str] = (0, "")

    @property
    def name(self) -> AgentName:
        return self.spec.name

    def may_come(self, round: int, phase: Phase) -> bool:
        """Whether it has ended what this phase needs."""
        newest = round - 1 - self.spec.max_lag if phase == Phase.ROLLOUT else round
        return not self.rounds or self.rounds[0] > newest


@dataclass(slots=True)
class Overlap:
    """See the module. `_gathering`: the phase that is to begin, and who has still to come to it."""

    training: Training
    _paces: tuple[Pace, ...] = ()
    _rounds: list[Round] = field(default_factory=list)
    _gathering: tuple[int, Phase, set[AgentName]] | None = None
    _rollouts: list[tuple[float, float]] = field(default_factory=list)  # when rollouts began and ended
    _playing: float | None = None  # since when a rollout is played
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _stopped: Stopped | None = None
    _waiting: set[anyio.CancelScope] = field(default_factory=set)

    async def run(self) -> None:
        """Stopped when the run is to end early, after the updates in hand."""
        training = self.training
        specs = {spec.name: spec for spec in training.spec.agents}
        bound = training.spec.rounds
        for agent in training.agents:
            queue, given = anyio.create_memory_object_stream[Round](bound)
            pace = Pace(agent, specs[agent.role.name], queue, given, version=(agent.version, agent.digest))
            self._paces = (*self._paces, pace)
        try:
            await at_once([self._play_all, *(partial(self._update_all, pace) for pace in self._paces)])
        finally:
            for pace in self._paces:
                pace.queue.close()
                pace.given.close()
        if self._stopped is not None:
            raise self._stopped

    # --- the rounds ---

    async def _play_all(self) -> None:
        try:
            for round in range(self.training.spec.rounds + 1):
                for phase in phases(self.training.spec, round):
                    await (self._rollout(round) if phase == Phase.ROLLOUT else self._evaluate(round))
            await self._until(lambda: not any(pace.rounds for pace in self._paces))
            self._close_round()
        except Stopped as stopped:
            self._stopped = stopped
            for scope in self._waiting:
                scope.cancel()
        for pace in self._paces:
            pace.queue.close()

    async def _rollout(self, round: int) -> None:
        training, clock = self.training, self.training.clock
        training.check_stop()
        training.left_out = set()
        clocked = Clocked()
        start = await self._gather(round, Phase.ROLLOUT, clocked)
        began = self._playing = clock.now()
        try:
            episodes = await training.play(start)
        finally:
            self._playing = None
        self._rollouts = [*self._rollouts, (began, clock.now())][-2 * len(self._rounds) - 4 :]
        clocked.engine = training.engine({})
        clocked.round, training.began = clock.now() - training.began, clock.now()
        self._hand_out(round, episodes)

    def _hand_out(self, round: int, episodes: Sequence[Episode]) -> None:
        """Every agent of the round gets its episodes."""
        training = self.training
        played = Played(round, episodes, training.played, {}, {}, training.clocked)
        ended = Round(played)
        self._rounds.append(ended)
        for pace in self._paces:
            measured = played.measured[pace.name] = {}
            if training.dropped:
                measured["count/dropped_episodes"] = float(training.dropped)
            if pace.name in training.left_out:
                measured["count/left_out"] = 1.0
                played.reports[pace.name] = pace.agent.learner.batch([], pace.agent.version).report
            else:
                pace.rounds.append(round)
                pace.queue.send_nowait(ended)

    async def _evaluate(self, round: int) -> None:
        self.training.check_stop()
        await self.training.evaluate(await self._gather(round, Phase.EVALUATE, Clocked()))
        self.training.engine({})
        self.training.began = self.training.clock.now()

    async def _gather(self, round: int, phase: Phase, clocked: Clocked) -> Opened:
        """Wait until the phase begins. Whoever may come, comes; the others when their updates have ended."""
        left_out = self.training.left_out
        self._gathering = round, phase, {pace.name for pace in self._paces if pace.name not in left_out}
        await self._come()
        self.training.clocked = clocked
        opened = await self.training.opened(round, phase, Edge.START)
        self._gathering = None
        self._close_round()
        return opened

    async def _come(self) -> None:
        if self._gathering is None:
            return
        round, phase, missing = self._gathering
        here = [pace for pace in self._paces if pace.name in missing and pace.may_come(round, phase)]
        if here:
            names = tuple(pace.name for pace in here)
            missing.difference_update(names)
            columns = tuple(pace.version[0] for pace in here), (), tuple(pace.version[1] for pace in here)
            at = self.training.spec.run, round, phase, Edge.START
            await self.training.client.arrive(Arrivals(*at, names, *columns))

    # --- the updates ---

    async def _update_all(self, pace: Pace) -> None:
        async for round in pace.given:
            if self._stopped is None:
                await self._update(pace, round.played)

    async def _update(self, pace: Pace, played: Played) -> None:
        agent, name, training = pace.agent, pace.name, self.training
        batch = agent.learner.batch(played.episodes, agent.version, agent.published)
        at = training.spec.run, played.round, Phase.UPDATE
        if due(pace.spec, played.round, len(batch.rows)):
            start = Arrive(*at, Edge.START, name, agent.version, len(batch.rows), agent.digest)
            if not await self._admitted(start):
                return
            played.measured[name] |= await self._learn(agent, played.round, batch.rows)
        elif not batch.rows and batch.report.reason:
            training.progress.note(f"round {played.round}, {name}: {batch.report.reason}")
        await training.client.end_update(Arrive(*at, Edge.END, name, agent.version, digest=agent.digest))
        pace.version = agent.version, agent.digest
        pace.rounds.remove(played.round)
        played.reports[name] = batch.report
        training.progress.updating(name, ARRIVED)
        self._keep_rounds()
        self._changed.set()
        self._changed = anyio.Event()
        await self._come()

    async def _admitted(self, start: Arrive) -> bool:
        """Whether the agent may update; False if the run is to end before its turn has come."""
        with anyio.CancelScope() as waiting:
            self._waiting.add(waiting)
            await self.training.client.begin_update(start)
        self._waiting.discard(waiting)
        return not waiting.cancelled_caught

    async def _learn(self, agent: Agent, round: int, rows: Sequence[Row]) -> dict[str, float]:
        """What the update measured, how long it took, and how long of that a rollout was played."""
        clock = self.training.clock
        began = clock.now()
        try:
            measured = await self.training.updater.learn(agent, rows)
        except OperationError as error:
            check_held(agent, error)
            self.training.progress.note(
                f"{agent.role.name} was not updated in round {round} and keeps version {agent.version}: {error}"
            )
            measured = {"count/refused_updates": 1.0}
        ended = clock.now()
        played = [*self._rollouts, *([(self._playing, ended)] if self._playing is not None else [])]
        beside = sum(max(0.0, min(ended, end) - max(began, start)) for start, end in played)
        return measured | {"update_seconds": ended - began, "overlap_seconds": beside}

    def _keep_rounds(self) -> None:
        """Keep the rows of what is complete, in the order of the rounds."""
        while self._rounds and self._rounds[0].closed and len(self._rounds[0].played.reports) == len(self._paces):
            self.training.keep_round(self._rounds.pop(0).played)

    def _close_round(self) -> None:
        """What follows the newest round begins now. Until then everybody waited for updates: that is part of its time."""
        training = self.training
        if self._rounds and not self._rounds[-1].closed:
            waited = training.clock.now() - training.began
            clocked = self._rounds[-1].played.clocked
            clocked.round += waited
            clocked.phases[Phase.UPDATE] = waited
            self._rounds[-1].closed = True
        training.began = training.clock.now()
        self._keep_rounds()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.training.check_stop()
            await self._changed.wait()
