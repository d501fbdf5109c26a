"""Play one episode of a scenario: the one place where scenario code is entered, and where everything that can end it is caught.

Whatever happens, exactly one outcome results: finished, forfeited, failed (with one reason), or dropped by the runtime. Only cancellation
from outside and a keyboard interrupt pass through; `exit()` fails the episode that called it and no other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol, runtime_checkable

import anyio

from agents.players.player import Player
from scenarios.blame import left, place, told
from scenarios.dealing import Dealer, TurnLimit
from scenarios.errors import Dropped, Forfeit, ScenarioError
from scenarios.numeric import read_scores
from scenarios.scenario import Scenario
from scenarios.table import Table
from scenarios.turns import Turns
from tinker.protocol.episodes import Episode, Line, Recording, Trajectory
from tinker.protocol.values import Ended, EpisodeId, SeatName


@dataclass(frozen=True, slots=True)
class Identity:
    """Which episode of which run this is. `group`: episodes that share their start; `evaluation`: "" in training."""

    run: str
    episode: EpisodeId
    group: int = 0
    evaluation: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use: turns (sub-turns included) and seconds. The seconds end a scenario that awaits for ever, but not one
    that computes for ever without awaiting anything."""

    max_turns: int = 1_000
    deadline: float = 600.0


@dataclass(frozen=True, slots=True)
class Play:
    """One playing of a scenario, apart from who plays."""

    identity: Identity
    rng_seed: int
    params: Mapping[str, object]
    limits: Limits
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the episode ended: the scores that count, how many were unusable, and why it did not finish."""

    ended: Ended
    scores: Mapping[str, float]
    bad_scores: int = 0
    reason: str = ""


@runtime_checkable
class Learning(Protocol):
    """A player that leaves something to learn from."""

    def trajectory(self) -> Trajectory:
        """Its tokens of this episode."""


async def play_episode(
    scenario: Scenario,
    players: Mapping[SeatName, Player],
    turns: Turns,
    *,
    identity: Identity,
    rng_seed: int,
    params: Mapping[str, object],
    limits: Limits = Limits(),
    clock: Callable[[], float],
) -> Episode:
    """Play it with these players, made for this episode, one per seat (else ValueError). `clock` counts seconds, for durations only."""
    play = Play(identity, rng_seed, params, limits, clock)
    episode, _ = await play_with_fault(scenario, players, turns, play)
    return episode


async def play_with_fault(
    scenario: Scenario, players: Mapping[SeatName, Player], turns: Turns, play: Play
) -> tuple[Episode, Exception | None]:
    """The episode, and what went wrong at its table, if anything did (replay tells a mismatch by it)."""
    if set(players) != set(scenario.seats):
        raise ValueError(
            f"scenario {scenario.name!r} has the seats {', '.join(scenario.seats)}; players came for {', '.join(players)}"
        )
    started = play.clock()
    seated = {SeatName(seat): players[SeatName(seat)] for seat in scenario.seats}
    scope = anyio.CancelScope(deadline=anyio.current_time() + play.limits.deadline)
    dealer = Dealer(
        seated, turns, retries=scenario.retries, max_turns=play.limits.max_turns, clock=play.clock, give_up=scope.cancel
    )
    table = Table(dealer, Random(play.rng_seed))
    outcome = await _outcome(scenario, table, dealer, play, scope)
    seconds = play.clock() - started
    outcome, trajectories = _collected(outcome, seated, dealer.recorder.lines)
    recording = Recording(
        run=play.identity.run,
        episode=play.identity.episode,
        scenario=scenario.name,
        version=scenario.version,
        seed=str(play.rng_seed),
        params=json.dumps(_bound(scenario, play.params), sort_keys=True, default=repr),
        players=tuple((seat, _label(player)) for seat, player in seated.items()),
        lines=dealer.recorder.lines,
        ended=outcome.ended,
        scores=tuple((SeatName(seat), score) for seat, score in outcome.scores.items()),
        reason=outcome.reason,
        evaluation=play.identity.evaluation,
    )
    episode = Episode(
        episode=play.identity.episode,
        group=play.identity.group,
        ended=outcome.ended,
        scores=recording.scores,
        measures=tuple(table.measures.items()),
        trajectories=trajectories,
        recording=recording,
        bad_scores=outcome.bad_scores,
        evaluation=play.identity.evaluation,
        seconds=seconds,
        scenario_seconds=max(0.0, seconds - dealer.outside),
    )
    return episode, dealer.fault


async def _outcome(scenario: Scenario, table: Table, dealer: Dealer, play: Play, scope: anyio.CancelScope) -> Outcome:
    """Enter the scenario. Of several things that end it at once the first in this order counts: a fault, the deadline, an act that was
    never awaited (with what came of it), its own end."""
    waiting_at = ""
    outcome: Outcome | None = None
    with scope:
        try:
            outcome = await _finished(scenario, table, play.params)
        except anyio.get_cancelled_exc_class() as cancelled:
            waiting_at = place(cancelled.__traceback__)
            raise
        finally:
            dealer.end()
    if dealer.fault is not None:
        return _faulted(dealer.fault)
    if outcome is None or anyio.current_time() >= scope.deadline:
        at = f", at {waiting_at}" if waiting_at else ""
        return Outcome(Ended.FAILED, {}, reason=f"timeout: not over after its {play.limits.deadline:g} s{at}")
    if dealer.promises.broken:
        failed = _faulted(dealer.misuse(dealer.promises.broken))
        detail = (outcome.reason, failed.reason) if outcome.reason else ()  # the cause comes first and last
        return replace(failed, reason="\n".join((failed.reason, *detail)))
    return outcome


async def _finished(scenario: Scenario, table: Table, params: Mapping[str, object]) -> Outcome:
    try:
        scores, bad = read_scores(await scenario.function(table, **scenario.bind(params)), scenario.seats)
        return Outcome(Ended.FINISHED, scores, bad, reason=f"{bad} scores were None, NaN or infinite" if bad else "")
    except Forfeit as forfeit:
        if forfeit.seat not in scenario.seats:
            return _faulted(
                ScenarioError(f"a Forfeit names the seat {forfeit.seat!r}; the seats are {', '.join(scenario.seats)}")
            )
        scores = scenario.forfeit.scores(scenario.seats, forfeit.seat)
        return Outcome(Ended.FORFEITED, scores, reason=str(forfeit))
    except SystemExit as exit:
        return _faulted(left(exit))
    except Exception as error:
        return _faulted(error)


def _faulted(error: Exception) -> Outcome:
    if isinstance(error, Dropped):
        return Outcome(Ended.DROPPED, {}, reason=str(error))
    if isinstance(error, TurnLimit):
        return Outcome(Ended.FAILED, {}, reason=f"max_turns: {error}")
    return Outcome(Ended.FAILED, {}, reason=told(error))


def _collected(
    outcome: Outcome, seated: Mapping[SeatName, Player], lines: tuple[Line, ...]
) -> tuple[Outcome, tuple[Trajectory, ...]]:
    """The trajectories of the players that learn, in seat order, with the table's count of forfeits (a player does not hear of a reply
    that never came). A player that cannot give one fails the episode."""
    forfeits = Counter(line.seat for line in lines if line.kind == "forfeit")
    try:
        learned = [player.trajectory() for player in seated.values() if isinstance(player, Learning)]
    except Exception as error:
        return (outcome if outcome.ended is Ended.FAILED else Outcome(Ended.FAILED, {}, reason=told(error))), ()
    return outcome, tuple(replace(trajectory, forfeits=forfeits[trajectory.seat]) for trajectory in learned)


def _bound(scenario: Scenario, params: Mapping[str, object]) -> dict[str, object]:
    """What the recording keeps: every parameter, defaults included, unless they are refused (then the episode fails by it)."""
    try:
        return scenario.bind(params)
    except ScenarioError:
        return dict(params)


def _label(player: Player) -> str:
    """How a recording names a player: its own `label`, or its class."""
    return str(getattr(player, "label", type(player).__name__))
