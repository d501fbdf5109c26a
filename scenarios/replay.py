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
    expected = replace(recording, ended=Ended.DROPPED) if open_asks else recording
    if mismatch := first_difference(expected, episode.recording):
        raise mismatch
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


def first_difference(recording: Recording, again: Recording) -> ReplayMismatch | None:
    """Where two playings of one episode part: a line (token ids aside), how it ended, or a score."""
    for index in range(max(len(recording.lines), len(again.lines))):
        one, other = (each.lines[index] if index < len(each.lines) else None for each in (recording, again))
        if _said(one) != _said(other) and (at := one or other):
            return ReplayMismatch(at.seat, at.turn, _shown(one), _shown(other))
    last = recording.lines[-1].turn if recording.lines else 0
    if recording.ended is not again.ended:
        ended = [f"that {each.ended.value}, {each.reason!r}" for each in (recording, again)]
        return ReplayMismatch("(table)", last, f"an episode {ended[0]}", f"one {ended[1]}")
    scores, others = dict(recording.scores), dict(again.scores)
    for seat in sorted({*scores, *others}):
        if scores.get(seat) != others.get(seat):
            return ReplayMismatch(seat, last, f"score {scores.get(seat)}", f"score {others.get(seat)}")
    return None


def _said(line: Line | None) -> Line | None:
    return replace(line, ids=PackedIds(b"")) if line else None


def _shown(line: Line | None) -> str:
    if line is None:
        return "nothing more"
    return f"{line.kind} {line.text!r} of seat {line.seat} in turn {line.turn}" + (
        f", cut by {line.cut}" if line.cut else ""
    )
