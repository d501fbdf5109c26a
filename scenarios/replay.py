"""Play a recorded episode again, without models, network or clock, and verify that it takes the same course.

Every line, the scores and the way it ended must be equal, token ids aside (replies are said again, not sampled again). A recording that
breaks off in an open turn (the runtime dropped it, a player failed) is verified up to there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from agents.players.player import Answer, Need
from agents.players.recorded import RecordedPlayer, ReplayMismatch
from scenarios.episode import Identity, Limits, Play, play_with_fault
from scenarios.errors import Dropped, Forfeited, RecordingError
from scenarios.scenario import Scenario
from tinker.protocol.episodes import Episode, Line, Recording
from tinker.protocol.values import Ended, PackedIds, SeatName

BROKEN_OFF = "the recording breaks off here"


async def replay(recording: Recording, scenario: Scenario, *, deadline: float = 60.0) -> Episode:
    """The episode as played again, with the given recording inside.

    Raises ReplayMismatch naming seat, turn and what differs first, and RecordingError for a recording of other rules. `deadline` in
    seconds ends a scenario that awaits foreign things for ever.
    """
    if (recording.scenario, recording.version) != (scenario.name, scenario.version):
        raise RecordingError(
            f"the recording is of scenario {recording.scenario!r} version {recording.version}, but this is {scenario.name!r} version "
            f"{scenario.version}; replay it with the rules that made it"
        )
    open_asks = _open_asks(recording) if recording.ended in (Ended.DROPPED, Ended.FAILED) else ()
    lines = (*recording.lines, *open_asks)
    players = {SeatName(seat): RecordedPlayer(SeatName(seat), lines) for seat in scenario.seats}
    play = Play(
        identity=Identity(recording.run, recording.episode, evaluation=recording.evaluation),
        rng_seed=int(recording.seed),
        params=json.loads(recording.params),
        limits=Limits(max_turns=_max_turns(recording), deadline=deadline),
        clock=lambda: 0.0,
    )
    episode, fault = await play_with_fault(scenario, players, ReplayTurns(players), play)
    if isinstance(fault, ReplayMismatch):
        raise fault
    _verify_ended(recording, episode, broken_off=bool(open_asks))
    _verify_lines(recording.lines, episode.recording.lines)
    _verify_scores(recording, episode)
    return replace(episode, ended=recording.ended, recording=recording)


class ReplayTurns:
    """`Turns` of a replay: only a seat whose recorded turn ended without a reply comes here, and it forfeits again."""

    def __init__(self, players: Mapping[SeatName, RecordedPlayer]) -> None:
        self._players = players

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        """The recorded forfeits; `Dropped` where the recording breaks off."""
        if any(self._players[seat].forfeit == BROKEN_OFF for seat in needs):
            raise Dropped(BROKEN_OFF)
        return {seat: Forfeited(seat, self._players[seat].forfeit) for seat in needs}


def _open_asks(recording: Recording) -> tuple[Line, ...]:
    """A made-up forfeit for every ask that was neither answered nor forfeited: there the recording breaks off."""
    waiting: dict[SeatName, Line] = {}
    for line in recording.lines:
        if line.kind == "ask":
            waiting[line.seat] = line
        elif line.kind in ("reply", "complaint", "forfeit"):
            waiting.pop(line.seat, None)
    return tuple(Line(seat, "forfeit", BROKEN_OFF, line.turn) for seat, line in waiting.items())


def _max_turns(recording: Recording) -> int:
    """Where the recorded episode ran into its limit of turns, so must this one; else the recording itself is the limit."""
    turns = 1 + max((line.turn for line in recording.lines if line.kind == "ask"), default=-1)
    return turns if recording.reason.startswith("max_turns:") else turns + 1


def _verify_ended(recording: Recording, episode: Episode, *, broken_off: bool) -> None:
    expected = Ended.DROPPED if broken_off else recording.ended
    if episode.ended is not expected:
        last = recording.lines[-1].turn if recording.lines else 0
        raise ReplayMismatch(
            "(table)",
            last,
            f"an episode that {recording.ended.value}, {recording.reason!r}",
            f"one that {episode.ended.value}, {episode.recording.reason!r}",
        )


def _verify_lines(expected: tuple[Line, ...], got: tuple[Line, ...]) -> None:
    for index in range(max(len(expected), len(got))):
        recorded = replace(expected[index], ids=PackedIds(b"")) if index < len(expected) else None
        replayed = got[index] if index < len(got) else None
        if recorded != replayed:
            at = recorded or replayed
            raise ReplayMismatch(at.seat if at else "(table)", at.turn if at else 0, _shown(recorded), _shown(replayed))


def _verify_scores(recording: Recording, episode: Episode) -> None:
    expected, got = dict(recording.scores), dict(episode.scores)
    last = recording.lines[-1].turn if recording.lines else 0
    for seat in sorted({*expected, *got}):
        if expected.get(seat) != got.get(seat):
            raise ReplayMismatch(seat, last, f"score {expected.get(seat)}", f"score {got.get(seat)}")


def _shown(line: Line | None) -> str:
    if line is None:
        return "nothing more"
    return f"{line.kind} {line.text!r} of seat {line.seat} in turn {line.turn}" + (
        f", cut by {line.cut}" if line.cut else ""
    )
