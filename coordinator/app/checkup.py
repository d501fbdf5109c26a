"""What `opentinker check` finds in a scenario: it is rehearsed under many seeds, then again in worlds that differ in one thing each.

A scenario may use its table's randomness and nothing else that changes. So every episode is played again with other global random
numbers, a clock that is ahead, another order of sets, and in another order of episodes; whichever of them changes an episode is named.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from coordinator.app.config import resolve
from coordinator.app.rehearsal import NOTES, RECORDINGS, Job, send
from scenarios import Scenario, read_recordings
from scenarios.replay import first_difference
from tinker.protocol.episodes import Recording
from tinker.protocol.values import Ended
from tinker.tokens import check_model_dir

PATIENCE = 30.0  # seconds for one episode
EVIDENCE = 10  # times that one seat's view must have told another's, to call it a leak
AHEAD = 123_456_789.0  # seconds
Said = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """`problem`: the scenario must change; else it is worth knowing."""

    problem: bool
    text: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    recordings: tuple[Recording, ...]
    awaited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """What is different, in words, and how that is done."""

    name: str
    random_seed: int = 0
    clock: float = 0.0
    hash_seed: str = "0"
    backwards: bool = False


SAME = World("nothing")
WORLDS = (
    World("Python's global random numbers (`random.…`, `numpy.random.…`): use table.rng", random_seed=1),
    World("the clock: a scenario may not depend on it", clock=AHEAD),
    World("the order of a set or of hashes (PYTHONHASHSEED): sort it, or use a dict or a list", hash_seed="1"),
    World("the order of the episodes: something is kept between them (a global, a default argument)", backwards=True),
)
ANOTHER = World("everything", random_seed=1, clock=AHEAD, hash_seed="1", backwards=True)
BASELINES, ANYTHING = "its baselines", "players that say anything"


class Unfinished(Exception):
    """A rehearsal did not come to its end."""


def checkup(scenario: Scenario, spec: str, model: Path, seeds: int, params: Mapping[str, Any]) -> list[Finding]:
    """Everything found, problems first. `spec`: what `load_scenario` makes the scenario of; `model`: a model directory."""
    found = list(_findings(scenario, spec, model, seeds, params))
    return sorted(dict.fromkeys(found), key=lambda each: not each.problem)


def _findings(scenario: Scenario, spec: str, model: Path, seeds: int, params: Mapping[str, Any]) -> Iterator[Finding]:
    config = resolve({"scenario": spec}, scenario.defaults)
    replies = dict.fromkeys(scenario.seats, config.replies)
    scripted = set(scenario.baselines) == set(scenario.seats)
    job = Job(spec, "", tuple(range(seeds)), params, None if scripted else replies)
    try:
        first = rehearse(job, SAME)
        yield from _ends(first.recordings, BASELINES if scripted else ANYTHING)
        yield from _waits(first)
        if not scripted:
            yield Finding(False, "it has no `baselines` for every seat: played by replies of its defaults, at random")
        else:
            replies = _said(first.recordings, replies)
        yield from _changes(job, first)
        context, longest = check_model_dir(model).context, config.learning.max_tokens
        spoken = replace(job, replies=replies, seeds=tuple(range(10 * seeds)))
        aimless = rehearse(replace(spoken, model=str(model), context=context, max_tokens=longest), SAME)
        yield from _ends(aimless.recordings, ANYTHING)
        yield from _leaks(scenario, aimless.recordings)
        yield from _cuts(aimless.recordings, context, longest)
    except Unfinished as unfinished:
        yield Finding(True, str(unfinished))


def rehearse(job: Job, world: World) -> Rehearsal:
    """Play it in a process of its own. Unfinished if it dies, or computes for ever."""
    with tempfile.TemporaryDirectory(prefix="opentinker-check-") as out:
        seeds = job.seeds[::-1] if world.backwards else job.seeds
        job = replace(job, out=out, seeds=seeds, random_seed=world.random_seed, clock=world.clock)
        with (Path(out) / "stderr").open("w+") as stderr:
            code, last = _watch(send(job), world.hash_seed, stderr)
            stderr.seek(0)
            said = stderr.read().strip().splitlines()
        at = f"the episode of seed {last}" if last else "its import"
        if code is None:
            raise Unfinished(
                f"{at} was not over after {PATIENCE:.0f} s: it computes without awaiting, and would block its host"
            )
        if code:
            raise Unfinished(f"{at} ended its process: {said[-1] if said else f'exit code {code}'}")
        recordings = sorted(read_recordings(Path(out) / RECORDINGS), key=lambda each: each.episode)
        notes = json.loads((Path(out) / NOTES).read_text())
    return Rehearsal(tuple(recordings), tuple(notes["awaited"]))


def _watch(job: str, hash_seed: str, stderr: IO[str]) -> tuple[int | None, str]:
    """The exit code (None: killed, because nothing more came) and the last episode that began."""
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.app.rehearsal"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    begun = b""
    with process:
        assert process.stdin and process.stdout
        process.stdin.write(job.encode())
        process.stdin.close()
        while select.select([process.stdout], [], [], PATIENCE)[0]:
            if not (data := os.read(process.stdout.fileno(), 4096)):
                process.wait()
                break
            begun += data
        else:
            process.kill()
            return None, (begun.decode().split() or [""])[-1]
    return process.returncode, (begun.decode().split() or [""])[-1]


def _ends(recordings: Sequence[Recording], players: str) -> Iterator[Finding]:
    """Episodes that failed, by reason; and baselines whose own answers are refused."""
    failed = [each for each in recordings if each.ended is Ended.FAILED]
    for reason, number in Counter(each.reason for each in failed).most_common(3):
        at = next(each.episode.index for each in failed if each.reason == reason)
        yield Finding(
            True, f"{number} of {len(recordings)} episodes failed with {players}, first with seed {at}: {reason}"
        )
    forfeited = [each for each in recordings if each.ended is Ended.FORFEITED]
    if players == BASELINES and forfeited:
        yield Finding(
            True,
            f"{len(forfeited)} of {len(recordings)} episodes with its baselines were forfeited, first with seed "
            f"{forfeited[0].episode.index}: {forfeited[0].reason}",
        )
    if len(forfeited) == len(recordings):
        yield Finding(False, f"every episode with {players} was forfeited, so little of it was rehearsed")


def _waits(rehearsal: Rehearsal) -> Iterator[Finding]:
    for place in rehearsal.awaited:
        yield Finding(
            False,
            f"it awaits something other than its table at {place}: a replay does that again, and it must give the same again",
        )


def _changes(job: Job, first: Rehearsal) -> Iterator[Finding]:
    """Which world changes an episode. If the same world does, none of the others says anything."""
    if not _first_change(first, rehearse(job, ANOTHER)):
        return
    if changed := _first_change(first, rehearse(job, SAME)):
        yield Finding(
            True,
            "the same seed gives another episode each time: it uses something that nobody can seed (os.urandom, uuid, "
            f"secrets, a thread, a file). {changed}",
        )
        return
    for world in WORLDS:
        if changed := _first_change(first, rehearse(job, world)):
            yield Finding(True, f"an episode depends on {world.name}. {changed}")


def _first_change(first: Rehearsal, second: Rehearsal) -> str:
    for one, other in zip(first.recordings, second.recordings, strict=True):
        if at := first_difference(one, other):
            return f"Seed {one.episode.index}, seat {at.seat}, turn {at.turn}: {at.expected}, and then {at.got}"
    return ""


def _said(recordings: Sequence[Recording], otherwise: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """What each seat was heard to say, so that players without aim can say it."""
    said: dict[str, dict[str, None]] = {seat: {} for seat in otherwise}
    for recording in recordings:
        for line in recording.lines:
            if line.kind == "reply":
                said[line.seat][line.text] = None
    return {seat: tuple(texts) or otherwise[seat] for seat, texts in said.items()}


def _leaks(scenario: Scenario, recordings: Sequence[Recording]) -> Iterator[Finding]:
    """Whether what another seat is shown up to its first turn tells what a private seat is shown up to its own, beyond what was said.

    The players say things at random, so nobody can have learned it from what was said.
    """
    if not scenario.private:
        yield Finding(False, "no seat is declared `private`, so nobody looked for secrets that other seats can see")
    for owner in scenario.private:
        for other in scenario.seats:
            told: defaultdict[tuple[Said, str], Counter[str]] = defaultdict(Counter)
            for recording in recordings:
                secret, said = _view(recording, owner)
                view, _ = _view(recording, other)
                if other != owner and secret and view:
                    told[said, view][secret] += 1
            if shown := _told(told):
                yield Finding(
                    True, f"{other} can see what {owner} alone should know: whenever {other} is shown {shown}"
                )


def _told(told: Mapping[tuple[Said, str], Counter[str]]) -> str:
    """An example, if the view always told the secret, and what was said before did not."""
    secrets: defaultdict[Said, set[str]] = defaultdict(set)
    for (said, _), found in told.items():
        secrets[said].update(found)
    again = sum(found.total() - 1 for (said, _), found in told.items() if len(secrets[said]) > 1)
    if again < EVIDENCE or any(len(found) > 1 for found in told.values()):
        return ""
    view, secret = next((view, next(iter(found))) for (said, view), found in told.items() if len(secrets[said]) > 1)
    return f"{view!r}, the other is shown {secret!r}"


def _view(recording: Recording, seat: str) -> tuple[str, Said]:
    """Everything this seat was shown up to its first turn, and what anybody had said by then; "" if it was never asked."""
    shown, said = [], []
    for line in recording.lines:
        if line.kind in ("reply", "complaint"):
            said.append(line.text)
        elif line.seat == seat:
            shown.append(line.text)
            if line.kind == "ask":
                return "\n".join(shown), tuple(said)
    return "", ()


def _cuts(recordings: Sequence[Recording], context: int, longest: int) -> Iterator[Finding]:
    """Whose texts or answers are too long for the model."""
    cuts = Counter((line.seat, line.cut) for each in recordings for line in each.lines if line.cut)
    for (seat, cut), number in sorted(cuts.items()):
        if cut == "context":
            yield Finding(
                True, f"{seat}: its texts do not fit into the model's context of {context} tokens ({number} times)"
            )
        else:
            yield Finding(
                False,
                f"{seat}: {number} answers of its baseline are longer than learning.max_tokens = {longest} in this model's tokens",
            )
