"""Find a scenario: by its name in the library, or in a Python file of the author's."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from scenarios.errors import ScenarioError
from scenarios.parameters import closest
from scenarios.scenario import Scenario


def load_scenario(spec: str) -> Scenario:
    """The scenario that `name`, `path/to/file.py` or `path/to/file.py:name` means; ScenarioError says what there is instead."""
    path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if path.endswith(".py"):
        return _chosen(spec, path, name)
    from scenarios.library import library  # imports every scenario of the library, so only when one is asked for

    known: Mapping[str, Scenario] = library()
    if spec not in known:
        raise ScenarioError(
            f"there is no scenario {spec!r}{closest(spec, known)}; the library has: {', '.join(sorted(known))}. "
            "A scenario of your own is named by its file: path/to/file.py"
        )
    return known[spec]


def _chosen(spec: str, path: str, name: str) -> Scenario:
    module = _imported(Path(path))
    values = [value for value in vars(module).values() if isinstance(value, Scenario)]
    own = {value.name: value for value in values if value.function.__module__ == module.__name__} or {
        value.name: value for value in values
    }
    names = ", ".join(own) or "none"
    if name and name not in own:
        raise ScenarioError(f"{path} has no scenario {name!r}{closest(name, own)}; it has: {names}")
    if not name and len(own) != 1:
        raise ScenarioError(f"{spec} must hold one scenario, or name one of them as {path}:name; it has: {names}")
    return own[name] if name else next(iter(own.values()))


def _imported(path: Path) -> ModuleType:
    """The file as a module of its own, imported anew; files beside it can be imported by it."""
    path = path.resolve()
    if not path.is_file():
        raise ScenarioError(f"there is no scenario file {path}")
    name = f"scenario_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ScenarioError(f"{path} cannot be imported as Python")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"{path} could not be imported: {type(error).__name__}: {error}") from error
    return module
