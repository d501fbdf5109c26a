"""`opentinker check`: what a scenario's author wants to know before a model plays it."""

from __future__ import annotations

import sys
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
