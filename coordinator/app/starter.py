"""A scenario package to begin with, made from the templates in `scenarios/starter`."""

from __future__ import annotations

import keyword
import sys
from importlib.resources import files
from pathlib import Path
from string import Template

from coordinator.app.names import PACKAGES
from scenarios.scenario import NAME

FILES = {"scenario.py.txt": "{}.py", "test_scenario.py.txt": "test_{}.py", "README.md.txt": "README.md"}


class StarterError(Exception):
    """The package cannot be made; the message says what to do."""


def start(name: str, into: Path) -> list[Path]:
    """Make `into/name` and return its files, the scenario first. StarterError if there is something already, or the name is no module's."""
    if not (NAME.fullmatch(name) and name.isidentifier()) or keyword.iskeyword(name):
        raise StarterError(f"{name!r} cannot be a scenario's name: use letters, digits and '_', a letter first")
    if name in {*sys.stdlib_module_names, *PACKAGES, "pytest", "test"}:
        raise StarterError(f"a module {name!r} exists already and would be hidden by this one; choose another name")
    home = into / name
    try:
        home.mkdir(parents=True)
        made = [home / pattern.format(name) for pattern in FILES.values()]
        for source, path in zip(FILES, made, strict=True):
            template = Template((files("scenarios") / "starter" / source).read_text(encoding="utf-8"))
            path.write_text(template.substitute(name=name), encoding="utf-8")
    except FileExistsError:
        raise StarterError(f"{home} exists already; choose another name, or another place with --in") from None
    except OSError as error:
        raise StarterError(
            f"{home} cannot be made: {error.strerror or error}; choose another place with --in"
        ) from error
    return made
