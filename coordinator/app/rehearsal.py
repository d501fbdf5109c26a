"""One rehearsal of a scenario in a process of its own: many episodes, no model, in a world that is changed on purpose.

    python -m coordinator.app.rehearsal < job.json

The world's clock may be put forward and Python's global random numbers seeded otherwise; the caller decides the hash seed, by the
environment. What was recorded goes to a file; a line on stdout says which episode begins, so that one that never ends can be named.
"""

from __future__ import annotations

import datetime
import json
import random
import sys
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from agents.players.player import Answer, Need, Player
from agents.players.policy import Playing, PolicyPlayer
from agents.players.scripted import Script, ScriptedPlayer
from scenarios import Forfeited, Identity, Limits, Scenario, load_scenario, play_episode, write_recordings
from tinker.protocol.episodes import Recording
from tinker.protocol.seeds import derive
from tinker.protocol.values import BASE, AgentName, EpisodeId, Finish, Phase, SeatName
from tinker.tokens import ChatTemplate, Tokenizer

RECORDINGS, NOTES = "recordings.jsonl", "notes.json"
CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
READERS = ("localtime", "gmtime", "ctime")  # of a time given, or of now
MAX_TURNS, SECONDS = 200, 5.0  # of one episode


@dataclass(frozen=True, slots=True)
class Job:
    """`seeds`: of the episodes, in the order in which they are played. `replies`: what each seat says, at random (None: the baselines
    play). `model`: a model directory whose template the players use (then `context` and `max_tokens` count)."""

    spec: str
    out: str
    seeds: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    replies: Mapping[str, tuple[str, ...]] | None = None
    random_seed: int = 0
    clock: float = 0.0
    model: str = ""
    context: int = 0
    max_tokens: int = 0


def main() -> None:
    """Do the job that is on stdin."""
    job = Job(**json.load(sys.stdin))
    put_forward(job.clock)
    scenario = load_scenario(job.spec)
    awaited: dict[str, None] = {}
    recordings = anyio.run(play_all, job, replace(scenario, function=_watched(scenario, awaited)))
    out = Path(job.out)
    write_recordings(out / RECORDINGS, recordings)
    (out / NOTES).write_text(json.dumps({"awaited": list(awaited)}))


async def play_all(job: Job, scenario: Scenario) -> list[Recording]:
    """One episode for each seed."""
    template = ChatTemplate(Tokenizer.from_dir(Path(job.model))) if job.model else None
    recordings = []
    for seed in job.seeds:
        print(seed, flush=True)
        _seed_everything(derive(job.random_seed, "global", seed))
        players, turns = _seated(job, scenario, seed, template)
        episode = await play_episode(
            scenario,
            players,
            turns,
            identity=Identity("rehearsal", EpisodeId(0, Phase.ROLLOUT, seed)),
            rng_seed=derive(0, "table", seed),
            params=job.params,
            limits=Limits(MAX_TURNS, SECONDS),
            clock=lambda: 0.0,
        )
        recordings.append(episode.recording)
    return recordings


def put_forward(seconds: float) -> None:
    """Whoever reads a clock of `time` or `datetime` from now on reads one that is ahead."""
    if not seconds:
        return
    for name in CLOCKS:
        setattr(time, name, _ahead(getattr(time, name), seconds))
        setattr(time, f"{name}_ns", _ahead(getattr(time, f"{name}_ns"), int(seconds * 1e9)))
    for name in READERS:
        setattr(time, name, _of_now(getattr(time, name)))

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Ahead:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Ahead:
            return cls.now(datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Ahead:
            return cls.now()

    class DateAhead(datetime.date):
        @classmethod
        def today(cls) -> DateAhead:
            return cls.fromtimestamp(time.time())

    datetime.datetime = Ahead  # type: ignore[misc]
    datetime.date = DateAhead  # type: ignore[misc]


def _ahead(read: Callable[[], float], by: float) -> Callable[[], float]:
    return lambda: read() + by


def _of_now(read: Callable[[float], Any]) -> Callable[..., Any]:
    return lambda seconds=None: read(time.time() if seconds is None else seconds)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


# --- who plays ---


class _NoTurns:
    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        raise AssertionError("players of a rehearsal answer at once")


@dataclass(frozen=True, slots=True)
class _Said:
    """Turns in which each seat's script is what its model says."""

    template: ChatTemplate
    scripts: Mapping[SeatName, ScriptedPlayer]

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        return {seat: self._answer(seat, need) for seat, need in needs.items()}

    def _answer(self, seat: SeatName, need: Need) -> Answer:
        reply = self.scripts[seat].ask("", attempt=0)
        assert not isinstance(reply, Need)
        ids = self.template.answer(reply.text)
        kept = ids[: need.sampling.max_tokens]
        finish = Finish.STOP if len(kept) == len(ids) else Finish.LENGTH
        return Answer(kept, [0.0] * len(kept), finish, BASE)


def _seated(
    job: Job, scenario: Scenario, seed: int, template: ChatTemplate | None
) -> tuple[dict[SeatName, Player], _NoTurns | _Said]:
    scripts = {
        SeatName(seat): ScriptedPlayer(_script(job, scenario, seat), random.Random(derive(0, "bot", seed, seat)))
        for seat in scenario.seats
    }
    if template is None:
        return dict(scripts), _NoTurns()
    playing = {
        seat: Playing(AgentName(seat), seat, BASE, max_tokens=job.max_tokens, context=job.context) for seat in scripts
    }
    players: dict[SeatName, Player] = {
        seat: PolicyPlayer(template, each, lambda ask: ask) for seat, each in playing.items()
    }
    return players, _Said(template, scripts)


def _script(job: Job, scenario: Scenario, seat: str) -> Script:
    if job.replies is None:
        return scenario.baselines[seat]
    replies = tuple(job.replies[seat])
    return lambda heard, prompt, rng: rng.choice(replies)


# --- what it waits for ---


def _watched(scenario: Scenario, awaited: dict[str, None]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The scenario's function; `awaited` gets the places where it waits for something that is not its table."""

    async def function(*args: Any, **params: Any) -> Any:
        return await _driven(scenario.function(*args, **params), awaited)  # type: ignore[arg-type]

    return function


@types.coroutine
def _driven(coroutine: Coroutine[Any, Any, Any], awaited: dict[str, None]) -> Generator[Any, Any, Any]:
    step: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
    while True:
        try:
            yielded = step()
        except StopIteration as stop:
            return stop.value
        if yielded is not None:  # its table only ever lets others have a turn, for its players answer at once
            awaited[_author(coroutine)] = None
        try:
            value = yield yielded
        except BaseException as error:
            step = lambda error=error: coroutine.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            step = lambda value=value: coroutine.send(value)  # type: ignore[misc]  # noqa: E731


def _author(coroutine: Any) -> str:
    """Where the innermost of the scenario's own coroutines stands."""
    place, inner = "", coroutine
    while getattr(inner, "cr_frame", None) is not None:
        if not place or inner.cr_code.co_filename == coroutine.cr_code.co_filename:
            place = f"{inner.cr_code.co_filename}:{inner.cr_frame.f_lineno}"
        inner = inner.cr_await
    return place


def send(job: Job) -> str:
    """The job as `main` reads it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()
