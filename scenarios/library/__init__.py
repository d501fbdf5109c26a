"""The scenarios that come with OpenTinker. One file each; a new file here is a new scenario."""

from __future__ import annotations

import importlib
import pkgutil

from scenarios.scenario import Scenario


def library() -> dict[str, Scenario]:
    """Every scenario here, by name, sorted. They are imported now, not with this package."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    scenarios = [value for module in modules for value in vars(module).values() if isinstance(value, Scenario)]
    return {each.name: each for each in sorted(scenarios, key=lambda each: each.name)}
