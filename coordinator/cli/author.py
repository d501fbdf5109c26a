"""`opentinker new`, `check` and `doctor`: what a scenario's author does before a model plays it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def check(
    scenario: Annotated[str, typer.Argument(help="A name of `opentinker scenarios`, or path/to/file.py[:name].")],
    seeds: Annotated[int, typer.Option(min=1, help="Episodes of each rehearsal.")] = 20,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="params.KEY=VALUE", help="A parameter of the scenario (repeatable)."),
    ] = None,
    model: Annotated[str, typer.Option(help="Whose template and context the texts must fit.")] = "demo",
) -> None:
    """Rehearse a scenario with scripted players and name what would go wrong; exit code 1 if anything would."""
    from coordinator.app.checkup import checkup
    from coordinator.app.config import ConfigError, assignment, merged
    from coordinator.app.models import model_directory
    from scenarios import ScenarioError, load_scenario

    try:
        chosen = load_scenario(scenario)
        given = merged(*(assignment(text) for text in assign or []))
        if set(given) - {"params"}:
            raise ConfigError("--set: only parameters of the scenario can be set here, as in --set params.tries=4")
        params = given.get("params", {})
        chosen.bind(params)
        directory = model_directory(model)
    except (ConfigError, ScenarioError) as error:
        print(f"opentinker: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    found = checkup(chosen, scenario, directory, seeds, params)
    for finding in found:
        print(f"{'problem' if finding.problem else 'note'}: {finding.text}")
    problems = sum(finding.problem for finding in found)
    print(f"{chosen.name}: " + (f"{problems} problems" if problems else "no problems found"))
    raise typer.Exit(1 if problems else 0)


def new(
    name: Annotated[str, typer.Argument(help="The scenario's name; a directory of this name is made.")],
    into: Annotated[Path, typer.Option("--in", metavar="DIR", help="Where the directory is made.")] = Path(),
) -> None:
    """Make a scenario of your own: the scenario, scripted players to compare with, its tests and a README."""
    from coordinator.app.starter import StarterError, start

    try:
        made = start(name, into)
    except StarterError as error:
        print(f"opentinker: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    for path in made:
        print(path)
    print(f"next: cd {made[0].parent} && opentinker check {name}.py && opentinker run {name}.py")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as one line of JSON.")] = False,
) -> None:
    """Look at this machine and say what to do: exit code 1 if something keeps runs from working."""
    from coordinator.app.doctor import examine

    lines = []
    for line in examine(Path.cwd()):
        lines.append(line)
        if not as_json:
            print(f"{line.state:8}{line.what}: {line.found}", flush=True)
            if line.do:
                print(f"        -> {line.do}", flush=True)
    if as_json:
        print(json.dumps([asdict(line) for line in lines]))
    if any(line.state == "problem" for line in lines):
        raise typer.Exit(1)
