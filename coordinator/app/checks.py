"""Everything about a run that can be refused before anything is started, refused at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from coordinator.app.cast import check, every_learning
from coordinator.app.config import ConfigError, RunConfig, merged, resolve
from coordinator.app.models import adaptable, model_directory
from coordinator.app.rollout import rollout_problems
from scenarios import Scenario


def checked(scenario: Scenario, layers: Sequence[Mapping[str, Any]], *, local: bool) -> tuple[RunConfig, str]:
    """The configuration from the scenario's defaults and these layers, and the model's directory ("" if the model is elsewhere).

    ConfigError names every problem there is.
    """
    problems: list[str] = []
    config: RunConfig | None = None
    try:
        config = resolve(scenario.defaults, *layers)
        check(scenario, config, local=local)
    except ConfigError as error:
        problems.append(str(error))
    if local and config is not None:
        ranks = {place: learning.rank for place, learning in every_learning(scenario, config, "rank")}
        problems += rollout_problems(config.rollout, config.engine, ranks)
    model = merged(scenario.defaults, *layers).get("model", RunConfig.model_fields["model"].default)
    directory = ""
    if local and isinstance(model, str):
        try:
            path = model_directory(model)
            directory = str(path)
            if config is not None:
                check_layers(scenario, config, adaptable(path))
        except ConfigError as error:
            problems.append(str(error))
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config, directory


def check_address(address: str) -> None:
    """ConfigError unless it can be connected to."""
    parts = urlsplit(address)
    try:
        good = parts.scheme == "ipc" or (parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"--coordinator: {address!r} is no address; expected something like tcp://127.0.0.1:7654")


def check_layers(scenario: Scenario, config: RunConfig, layers: Collection[str]) -> None:
    """ConfigError if an adapter is wanted for layers that the model does not have (`layers` empty: not known)."""
    problems: dict[str, None] = {}
    for place, learning in every_learning(scenario, config, "targets"):
        unknown = sorted(set(learning.targets) - set(layers))
        if layers and unknown:
            there = ", ".join(sorted(layers))
            problems[f"{place}: {config.model} has no layer {', '.join(unknown)}; it has {there}"] = None
        elif not learning.targets:
            problems[f"{place}: an adapter needs at least one layer"] = None
    if problems:
        raise ConfigError("\n".join(problems))
