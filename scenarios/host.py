"""The host: plays the episodes that the coordinator hands out, with the players that the run seats.

It never decides when a phase begins or which episodes there are; it plays what `Play` messages name, accounts for each, and keeps the
finished episodes for the learner. All randomness of an episode comes from the run's seed and the episode's place, never from timing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from agents.players.player import Answer, Need, Player
from agents.players.policy import Playing, PolicyPlayer
from agents.players.scripted import ScriptedPlayer
from scenarios.episode import Identity, Limits, play_episode
from scenarios.errors import Dropped, Forfeited
from scenarios.scenario import Evaluation, Scenario
from tinker.client import CoordinatorLost, RunOver, TurnError
from tinker.protocol.episodes import Episode
from tinker.protocol.seeds import derive
from tinker.protocol.to_coordinator import EpisodeEnded, OpenTurn, SeatRequest
from tinker.protocol.to_host import Play, SeatResult, TurnClosed
from tinker.protocol.values import (
    AgentName,
    EpisodeId,
    Phase,
    PolicyName,
    PolicyVersion,
    RunId,
    SeatName,
    TurnId,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from tinker.tokens import ChatTemplate

HELD_OUT = 0x0E7A1  # the seed of every evaluation, whatever the run's seed: scores of different runs compare

MOMENT = 1.0  # seconds that an episode has to hear at its next turn that its run is over


class Runtime(Protocol):
    """What a host needs of its connection (`tinker.client.Client`)."""

    @property
    def plays(self) -> MemoryObjectReceiveStream[Play]: ...

    async def turn(self, message: OpenTurn) -> TurnClosed: ...

    def account(self, message: EpisodeEnded) -> None: ...


@dataclass(frozen=True, slots=True)
class Cast:
    """Who learns on a seat: the agent, its policy, and how it samples."""

    agent: AgentName
    policy: PolicyName
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Production:
    """Everything about a run that its episodes need. `cast` has every seat."""

    run: RunId
    seed: int
    scenario: Scenario
    cast: Mapping[SeatName, Cast]
    template: ChatTemplate
    context: int
    params: Mapping[str, object] = field(default_factory=dict)
    limits: Limits = Limits()
    turn_deadline: float = 120.0
    concurrency: int = 256


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One episode of the evaluate phase: the `number`-th of an evaluation, greedy or sampled."""

    evaluation: Evaluation
    greedy: bool
    number: int

    @property
    def label(self) -> str:
        return f"{self.evaluation.name}/{'greedy' if self.greedy else 'sampled'}"


def held_out(scenario: Scenario) -> tuple[HeldOut, ...]:
    """The episodes of every evaluate phase of this scenario, in order: each evaluation sampled, then greedy."""
    return tuple(
        HeldOut(evaluation, greedy, number)
        for evaluation in scenario.evaluations
        for greedy in (False, True)
        for number in range(evaluation.episodes)
    )


class Host:
    """Plays one phase at a time. `stop` makes it open no more turns: what runs is dropped at its next turn.
    `engine_seconds`: how long the busiest engine had been at work when it was last heard."""

    def __init__(self, runtime: Runtime, production: Production, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._production = production
        self._clock = clock
        self._held_out = held_out(production.scenario)
        self._stopping = ""
        self.engine_seconds = 0.0

    def stop(self, reason: str) -> None:
        self._stopping = reason

    async def play(
        self,
        total: int,
        versions: Mapping[PolicyName, int],
        on_done: Callable[[Episode], None] = lambda episode: None,
        left_out: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> list[Episode]:
        """Play `total` episodes as they are handed out, with these versions; returns them in order of their index. `left_out` returns when
        the coordinator has dropped some: those are given up where they are, and no more are handed out."""
        episodes: list[Episode] = []
        places = anyio.CapacityLimiter(self._production.concurrency)
        playing: dict[str, anyio.CancelScope] = {}
        handing_out = anyio.CancelScope()

        async def one(episode: EpisodeId, group: int) -> None:
            played: Episode | None = None
            with anyio.CancelScope() as playing[str(episode)]:
                async with places:
                    played = await self._episode(episode, group, versions)
            del playing[str(episode)]
            if played is None:
                return
            episodes.append(played)
            reason = played.recording.reason
            self._runtime.account(EpisodeEnded(self._production.run, episode, played.ended, reason[-500:]))
            on_done(played)

        async def give_up(left_out: Callable[[], Awaitable[Collection[str]]]) -> None:
            try:
                dropped = await left_out()
            except (
                RunOver,
                CoordinatorLost,
            ):  # so do those who wait for a turn, and the others await what may never come
                await anyio.sleep(MOMENT)
                dropped = tuple(playing)
            handing_out.cancel()
            for episode in dropped:
                if episode in playing:
                    playing[episode].cancel()

        async def play_all() -> None:
            async with anyio.create_task_group() as tasks:
                handed_out = 0
                with handing_out:
                    while handed_out < total:
                        try:
                            message = await self._runtime.plays.receive()
                        except anyio.EndOfStream:  # the run is over; whoever waits for the barrier is told why
                            break
                        handed_out += len(message.episodes)
                        for episode in message.episodes:
                            tasks.start_soon(one, episode, message.group, name=f"episode {episode}")
                self._forget_plays(handed_out < total)

        async with anyio.create_task_group() as watching:
            if left_out is not None:
                watching.start_soon(give_up, left_out, name="give up what is dropped")
            await play_all()
            watching.cancel_scope.cancel()
        return sorted(episodes, key=lambda each: each.episode)

    def _forget_plays(self, dropped: bool) -> None:
        """What was handed out and is dropped is not played in the next phase."""
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while dropped:
                self._runtime.plays.receive_nowait()

    async def _episode(self, id: EpisodeId, group: int, versions: Mapping[PolicyName, int]) -> Episode:
        production = self._production
        evaluating = id.phase == Phase.EVALUATE
        item = self._held_out[id.index] if evaluating else None
        seed = HELD_OUT if item else production.seed
        place: tuple[object, ...] = (item.label, item.number) if item else (id.phase, id.round, id.index)
        start = (item.evaluation.name, item.number) if item else (id.phase, id.round, group)
        players = {
            SeatName(seat): self._player(SeatName(seat), item, seed, place, versions)
            for seat in production.scenario.seats
        }
        return await play_episode(
            production.scenario,
            players,
            _CoordinatedTurns(self, id),
            identity=Identity(production.run, id, group, item.label if item else ""),
            rng_seed=derive(seed, "table", *start),
            params={**production.params, **(item.evaluation.params if item else {})},
            limits=production.limits,
            clock=self._clock,
        )

    def _player(
        self,
        seat: SeatName,
        item: HeldOut | None,
        seed: int,
        place: Sequence[object],
        versions: Mapping[PolicyName, int],
    ) -> Player:
        if item is not None and seat in item.evaluation.opponents:
            return ScriptedPlayer(item.evaluation.opponents[seat], Random(derive(seed, "bot", *place, seat)))
        production = self._production
        cast = production.cast[seat]
        playing = Playing(
            cast.agent,
            seat,
            PolicyVersion(cast.policy, versions[cast.policy]),
            cast.max_tokens,
            production.context,
            0.0 if item is not None and item.greedy else cast.temperature,
            production.scenario.learn_from_forfeits,
        )
        return PolicyPlayer(production.template, playing, lambda ask: derive(seed, "request", *place, seat, ask))

    async def turn(self, episode: EpisodeId, number: int, needs: Mapping[SeatName, Need]) -> TurnClosed:
        """One turn through the coordinator; Dropped when this host stops or the run is over."""
        if self._stopping:
            raise Dropped(self._stopping)
        production = self._production
        requests = tuple(
            SeatRequest(seat, need.policy, pack_ids(need.prompt), need.sampling) for seat, need in needs.items()
        )
        message = OpenTurn(TurnId(production.run, episode, number), requests, production.turn_deadline)
        try:
            return await self._runtime.turn(message)
        except (RunOver, CoordinatorLost) as error:
            raise Dropped(str(error)) from error
        except TurnError as error:
            if self._stopping:  # meanwhile the coordinator was told to stop, too
                raise Dropped(self._stopping) from error
            raise


@dataclass(frozen=True, slots=True)
class _CoordinatedTurns:
    """The coordinator behind one table (`scenarios.turns.Turns`)."""

    host: Host
    episode: EpisodeId

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        closed = await self.host.turn(self.episode, number, needs)
        self.host.engine_seconds = max(self.host.engine_seconds, *(result.engine for result in closed.results))
        return {result.seat: _answer(result) for result in closed.results}


def _answer(result: SeatResult) -> Answer | Forfeited:
    if result.forfeit:
        return Forfeited(result.seat, result.forfeit)
    return Answer(
        unpack_ids(result.ids),
        unpack_floats(result.logprobs),
        result.finish,
        result.version,
        result.worker,
        result.busy,
    )
