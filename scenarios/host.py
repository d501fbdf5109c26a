"""The host: plays the episodes that the coordinator hands out, with the players that the run seats.

It never decides when a phase begins or which episodes there are; it plays what `Play` messages name, accounts for each, and keeps the
finished episodes for the learner. All randomness of an episode comes from the run's seed and the episode's place, never from timing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import anyio

from agents.players.player import Answer, Need, Player
from agents.players.policy import Playing, PolicyPlayer
from agents.players.scripted import ScriptedPlayer
from scenarios.episode import Identity, Limits, play_episode
from scenarios.errors import Dropped, Forfeited
from scenarios.phase import Fetch, PhaseInHand, Runtime, no_fetch
from scenarios.scenario import Evaluation, Scenario
from tinker.client import CoordinatorLost, RunOver, TurnError
from tinker.protocol.episodes import Episode
from tinker.protocol.seeds import derive
from tinker.protocol.to_coordinator import OpenTurn, SeatRequest
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
    """Plays one phase at a time. `stop` makes it open no more turns: what runs is dropped at its next turn. `fetch` gets what further
    hosts have played. `engine_seconds`: how long the busiest engine had been at work when it was last heard."""

    def __init__(
        self, runtime: Runtime, production: Production, clock: Callable[[], float], fetch: Fetch = no_fetch
    ) -> None:
        self._runtime = runtime
        self._production = production
        self._clock = clock
        self._held_out = held_out(production.scenario)
        self._fetch = fetch
        self._phase: PhaseInHand | None = None
        self._over: set[tuple[int, Phase]] = set()
        self._stopping = ""
        self.engine_seconds = 0.0

    @property
    def run(self) -> RunId:
        return self._production.run

    def stop(self, reason: str) -> None:
        self._stopping = reason
        if self._phase is not None:
            self._phase.stop()

    async def play(
        self,
        total: int,
        versions: Mapping[PolicyName, int],
        on_done: Callable[[Episode], None] = lambda episode: None,
        left_out: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> list[Episode]:
        """One phase of `total` episodes with these versions, whoever plays them; returns them in order of their index. `left_out` returns
        when the coordinator has dropped some: those are given up where they are, and no more are handed out."""
        self._phase = PhaseInHand(self._runtime, self._production.run, total, self._fetch, on_done, self._over)
        if self._stopping:
            self._phase.stop()
        places = anyio.CapacityLimiter(self._production.concurrency)

        async def one(play: Play, episode: EpisodeId) -> Episode:
            async with places:
                return await self.episode(episode, play.group, versions, play.attempt)

        episodes = await self._phase.play(one, left_out)
        self._over |= {(each.episode.round, each.episode.phase) for each in episodes}
        return episodes

    async def episode(self, id: EpisodeId, group: int, versions: Mapping[PolicyName, int], attempt: int = 0) -> Episode:
        """Play one episode of this group, with these versions."""
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
            _CoordinatedTurns(self, id, attempt),
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

    async def turn(self, id: TurnId, needs: Mapping[SeatName, Need]) -> TurnClosed:
        """One turn through the coordinator; Dropped when this host stops, the run is over, or the episode is another host's now."""
        if self._stopping:
            raise Dropped(self._stopping)
        production = self._production
        requests = tuple(
            SeatRequest(seat, need.policy, pack_ids(need.prompt), need.sampling) for seat, need in needs.items()
        )
        message = OpenTurn(id, requests, production.turn_deadline)
        try:
            return await self._runtime.turn(message)
        except (RunOver, CoordinatorLost) as error:
            raise Dropped(str(error)) from error
        except TurnError as error:
            if self._stopping or error.fenced:  # meanwhile the coordinator was told to stop, too
                raise Dropped(self._stopping) from error
            raise


@dataclass(frozen=True, slots=True)
class _CoordinatedTurns:
    """The coordinator behind one table (`scenarios.turns.Turns`)."""

    host: Host
    episode: EpisodeId
    attempt: int

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        closed = await self.host.turn(TurnId(self.host.run, self.episode, number, self.attempt), needs)
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
