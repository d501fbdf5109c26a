"""The recorded episodes of a run directory: found by name, played again, and what differs shown in words."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from agents.players.recorded import ReplayMismatch
from coordinator.app.rundir import RunDirectoryError, blamed
from scenarios import RecordingError, Scenario, load_scenario, read_recordings, render, replay
from tinker.protocol.episodes import Recording
from tinker.protocol.values import Phase

FILE = re.compile(r"([a-z]+)-(\d{4,})\.jsonl")
NAME = re.compile(r"\d+(/[a-z]+(/\d+)?)?")
SHOWN = 12  # lines of an episode before what differs


@dataclass(frozen=True, slots=True)
class Selection:
    """Episodes of one run. A name is ROUND/PHASE/INDEX, or its beginning for all of a phase or round; no name: the last phase recorded."""

    run: Path
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """RUN or RUN:NAME[,NAME...]. RunDirectoryError if there is no such run, or a name is none."""
        path, names = Path(text), ""
        if not path.is_dir() and ":" in text:
            before, _, names = text.rpartition(":")
            path = Path(before)
        if not (path / "config.toml").is_file():
            raise RunDirectoryError(f"{path} is no run directory (it has no config.toml); name one, as in runs/guess-1")
        chosen = tuple(name.strip() for name in names.split(",") if name.strip())
        for name in chosen:
            if not NAME.fullmatch(name):
                raise RunDirectoryError(f"{name!r} names no episode; expected ROUND/PHASE/INDEX, as in 1/rollout/0")
        return cls(path, chosen)

    def recordings(self, *, all: bool = False) -> Iterator[Recording]:
        """Those episodes, in the order in which they were played. RunDirectoryError names what is not there."""
        files = _files(self.run)
        if not files:
            raise RunDirectoryError(f"{self.run} has no recordings yet; an episode is recorded when its phase is over")
        names = self.names or (() if all else ("/".join(map(str, files[-1][:2])),))
        missing = set(names)
        for round, phase, path in files:
            wanted = [name for name in names if _reaches(name, f"{round}/{phase}")]
            if names and not wanted:
                continue
            with blamed(path):
                found = read_recordings(path)
            for recording in found:
                here = [name for name in wanted if _begins(name, str(recording.episode))]
                missing -= set(here)
                if here or not names:
                    yield recording
        if missing:
            rounds = f"{files[0][0]} to {files[-1][0]}"
            raise RunDirectoryError(f"{self.run} has no episode {', '.join(sorted(missing))}; its rounds are {rounds}")

    def scenario(self, spec: str = "") -> Scenario:
        """What was played: as the run's configuration names it, or `spec` if its file has moved."""
        path = self.run / "config.toml"
        with blamed(path):
            named = str(tomllib.loads(path.read_text(encoding="utf-8")).get("scenario", ""))
        return load_scenario(spec or named)


@dataclass(frozen=True, slots=True)
class Difference:
    """An episode that did not take its recorded course again."""

    recording: Recording
    error: ReplayMismatch | RecordingError

    def __str__(self) -> str:
        """What differs first, after the last lines of the episode before it."""
        head = f"{self.recording.episode}: {self.error}"
        if not isinstance(self.error, ReplayMismatch):
            return head
        before = [line for line in self.recording.lines if line.turn <= self.error.turn]
        words = render(replace(self.recording, lines=tuple(before), scores=())).splitlines()[2:-1]
        cut = ["  ..."] if len(words) > SHOWN else []
        return "\n".join([head, *cut, *words[-SHOWN:]])


async def played_again(recording: Recording, scenario: Scenario) -> Difference | None:
    """None if the episode took the same course."""
    try:
        await replay(recording, scenario)
    except (ReplayMismatch, RecordingError) as error:
        return Difference(recording, error)
    return None


def newest_recordings(run: Path, phase: Phase) -> list[Recording]:
    """The episodes of this phase that were recorded last; none if there are none. RecordingError, RunDirectoryError if they are damaged."""
    paths = [path for _, found, path in _files(run) if found == phase]
    if not paths:
        return []
    with blamed(paths[-1]):
        return list(read_recordings(paths[-1]))


def _files(run: Path) -> list[tuple[int, Phase, Path]]:
    """The files of recordings, in the order in which they were played: of a round the rollout comes first."""
    phases = {phase.value: phase for phase in Phase}
    found = [(FILE.fullmatch(path.name), path) for path in (run / "recordings").glob("*.jsonl")]
    named = [
        (int(match[2]), phases[match[1]], path) for match, path in found if match is not None and match[1] in phases
    ]
    return sorted(named, key=lambda each: (each[0], list(Phase).index(each[1])))


def _begins(name: str, episode: str) -> bool:
    return f"{episode}/".startswith(f"{name}/")


def _reaches(name: str, place: str) -> bool:
    """Whether episodes of this round and phase can be meant."""
    return _begins(name, place) or name.startswith(f"{place}/")
