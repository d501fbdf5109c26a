"""A recording as a transcript that a person reads: who was told, asked and said what, turn by turn, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator

from tinker.protocol.episodes import Line, Recording

WORDS = {
    "brief": "is briefed",
    "hear": "hears",
    "ask": "is asked",
    "reply": "says",
    "complaint": "says, but not as asked",
    "forfeit": "forfeits",
}


def render(recording: Recording, seat: str = "") -> str:
    """The episode in words, or what one seat knew of it. Token ids are left out."""
    return "\n".join(_sentences(recording, seat))


def _sentences(recording: Recording, seat: str) -> Iterator[str]:
    place = f"{recording.episode} ({recording.evaluation})" if recording.evaluation else str(recording.episode)
    yield f"Episode {place} of {recording.scenario} version {recording.version}, seed {recording.seed}, {recording.params}"
    yield "Players: " + ", ".join(f"{seat} is {player}" for seat, player in recording.players)
    turn = -1
    for line in recording.lines:
        if seat and line.seat != seat:
            continue
        if line.kind == "ask" and line.turn != turn:
            turn = line.turn
            yield f"Turn {turn}"
        yield _sentence(line)
    yield f"It {recording.ended.value}" + (f": {recording.reason}" if recording.reason else "")
    if recording.scores:
        yield "Scores: " + ", ".join(f"{seat} {score:g}" for seat, score in recording.scores)


def _sentence(line: Line) -> str:
    cut = f" (cut off by the {line.cut} limit)" if line.cut else ""
    return f"  {line.seat} {WORDS.get(line.kind, line.kind)}{cut}: " + line.text.replace("\n", "\n      ")
