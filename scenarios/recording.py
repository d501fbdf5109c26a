"""Recordings: collected at the table while an episode is played, and kept as JSON Lines.

One object per line with its format number inside, fields in the order of `tinker.protocol.episodes.Recording`, token ids as lists of ints.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scenarios.errors import RecordingError
from tinker.protocol.episodes import Line, Recording
from tinker.protocol.values import Ended, EpisodeId, Phase, SeatName, pack_ids, unpack_ids

FORMAT = 1


class Recorder:
    """Collects the lines of one episode in the order in which they happen.

    brief and hear lines carry the number of the turn that comes next. Every `ask` is followed by one line of its seat: `reply` (the
    player's words), `complaint` (its words too, but they did not parse: the parser's message is the text of the seat's next `ask`, or
    of its `forfeit`), or `forfeit` alone when no reply came.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(self, seat: str, kind: str, text: str, turn: int, *, ids: Iterable[int] = (), cut: str = "") -> None:
        """Append one line."""
        self._lines.append(Line(SeatName(seat), kind, text, turn, pack_ids(ids), cut))

    def has_lines(self, seat: str) -> bool:
        """Whether anything happened at this seat yet."""
        return any(line.seat == seat for line in self._lines)

    @property
    def lines(self) -> tuple[Line, ...]:
        """What happened so far."""
        return tuple(self._lines)


def cuts(recording: Recording) -> Mapping[str, int]:
    """How many replies each limit cut off (`length`, `context`)."""
    return Counter(line.cut for line in recording.lines if line.cut)


def write_recordings(path: Path, recordings: Iterable[Recording]) -> None:
    """Write them as one file, in this order: beside it first, then renamed, so that it is never half there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            for recording in recordings:
                file.write(json.dumps(_to_json(recording), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_recordings(path: Path) -> list[Recording]:
    """The inverse of `write_recordings`. RecordingError names the line that cannot be read."""
    recordings = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                data = json.loads(text)
                found = data["format"]
            except (ValueError, KeyError, TypeError) as error:
                raise RecordingError(f"{place} is no recording ({error!r})") from error
            if found != FORMAT:
                raise RecordingError(f"{place} has format {found!r}; this version reads format {FORMAT}")
            try:
                recordings.append(_from_json(data))
            except (ValueError, KeyError, TypeError) as error:
                raise RecordingError(f"{place} is a damaged recording ({error!r})") from error
    return recordings


def _to_json(recording: Recording) -> dict[str, Any]:
    episode = recording.episode
    return {
        "format": FORMAT,
        "run": recording.run,
        "episode": {"round": episode.round, "phase": episode.phase.value, "index": episode.index},
        "scenario": recording.scenario,
        "version": recording.version,
        "seed": recording.seed,
        "params": recording.params,
        "players": [list(pair) for pair in recording.players],
        "lines": [
            {
                "seat": line.seat,
                "kind": line.kind,
                "text": line.text,
                "turn": line.turn,
                "ids": unpack_ids(line.ids),
                "cut": line.cut,
            }
            for line in recording.lines
        ],
        "ended": recording.ended.value,
        "scores": [list(pair) for pair in recording.scores],
        "reason": recording.reason,
        "evaluation": recording.evaluation,
    }


def _from_json(data: Mapping[str, Any]) -> Recording:
    episode = data["episode"]
    return Recording(
        run=str(data["run"]),
        episode=EpisodeId(int(episode["round"]), Phase(episode["phase"]), int(episode["index"])),
        scenario=str(data["scenario"]),
        version=int(data["version"]),
        seed=str(data["seed"]),
        params=str(data["params"]),
        players=tuple((SeatName(seat), str(player)) for seat, player in data["players"]),
        lines=tuple(
            Line(
                seat=SeatName(line["seat"]),
                kind=str(line["kind"]),
                text=str(line["text"]),
                turn=int(line["turn"]),
                ids=pack_ids(line["ids"]),
                cut=str(line["cut"]),
            )
            for line in data["lines"]
        ),
        ended=Ended(data["ended"]),
        scores=tuple((SeatName(seat), float(score)) for seat, score in data["scores"]),
        reason=str(data["reason"]),
        evaluation=str(data.get("evaluation", "")),  # older files of this format do not have it
    )
