"""`opentinker replay` and `opentinker show`: the recorded episodes of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import anyio
import typer

if TYPE_CHECKING:
    from coordinator.app.recorded import Difference

Episodes = Annotated[
    str,
    typer.Argument(metavar="RUN[:EPISODE,…]", help="A run directory, and which episodes (1/rollout/0, 1/rollout, 1)."),
]
ScenarioSpec = Annotated[
    str,
    typer.Option("--scenario", metavar="SPEC", help="The scenario, if its file has moved since (default: the run's)."),
]


def replay(
    episodes: Episodes,
    all: Annotated[bool, typer.Option("--all", help="Every episode of the run (default: its last phase).")] = False,
    scenario: ScenarioSpec = "",
) -> None:
    """Play recorded episodes again, without a model: exit code 1 if one takes another course, and where."""
    from coordinator.app.recorded import Selection, played_again
    from coordinator.app.rundir import RunDirectoryError
    from scenarios import RecordingError, ScenarioError

    async def play() -> tuple[int, list[Difference]]:
        chosen = Selection.parse(episodes)
        rules = chosen.scenario(scenario)
        number, differences = 0, []
        for recording in chosen.recordings(all=all):
            number += 1
            if difference := await played_again(recording, rules):
                differences.append(difference)
        return number, differences

    try:
        number, differences = anyio.run(play)
    except (RunDirectoryError, RecordingError, ScenarioError) as error:
        _refuse(error)
    if not differences:
        print(f"{number} episodes took the same course again")
        return
    print(differences[0])
    print(f"{len(differences)} of {number} episodes took another course" + _others(differences[1:]))
    raise typer.Exit(1)


def show(
    episodes: Episodes,
    seat: Annotated[str, typer.Option(metavar="NAME", help="Only what this seat heard and said.")] = "",
) -> None:
    """Print recorded episodes in words; of a run alone, a list of the last phase's."""
    from coordinator.app.recorded import Selection
    from coordinator.app.rundir import RunDirectoryError
    from scenarios import RecordingError, render

    try:
        chosen = Selection.parse(episodes)
        for recording in chosen.recordings():
            seats = [name for name, _ in recording.players]
            if seat and seat not in seats:
                raise RunDirectoryError(f"there is no seat {seat!r}; the seats are {', '.join(seats)}")
            if chosen.names:
                print(render(recording, seat), end="\n\n")
            else:
                scores = ", ".join(f"{name} {score:g}" for name, score in recording.scores)
                print(f"{recording.episode}  {recording.ended.value}  {scores}  {recording.evaluation}".rstrip())
    except (RunDirectoryError, RecordingError) as error:
        _refuse(error)


def _others(differences: Sequence[Difference]) -> str:
    if not differences:
        return ""
    names = [str(each.recording.episode) for each in differences[:10]]
    return "; the others: " + ", ".join(names) + (" ..." if len(differences) > 10 else "")


def _refuse(error: Exception) -> NoReturn:
    print(f"opentinker: {error}", file=sys.stderr)
    raise typer.Exit(2) from error
