"""What an agent has learned, as others can use it: a PEFT adapter, or a plain Hugging Face model with the adapter merged in.

The target is written beside and renamed, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from coordinator.app.config import ConfigError, read_toml
from coordinator.app.models import model_directory
from coordinator.app.rundir import RunDirectoryError, blamed
from tinker.engines.checks import ADAPTER_CONFIG
from tinker.engines.engine import EngineError


def export(run: Path, agent: str, target: Path | None, version: int | None, model: str, merge: bool) -> Path:
    """Returns the directory that was made. `version` None: the newest; `model` "": the run's base model. RunDirectoryError or ConfigError
    if something is not there, or does not fit; nothing is left then."""
    number, files = adapter_of(run, agent, version)
    config = read_toml(run / "config.toml")
    base = model or str(config.get("model", "demo"))
    target = target or run / "export" / f"{agent}-v{number:06d}{'-merged' if merge else ''}"
    if target.exists():
        raise RunDirectoryError(f"{target} is there already: choose another place with --out, or move it away")
    directory = model_directory(base)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    with blamed(target):
        beside.mkdir(parents=True)
        try:
            if merge:
                _merge(directory, files, beside)
            else:
                for name, data in _named(files, base, directory).items():
                    (beside / name).write_bytes(data)
            beside.rename(target)
        except EngineError as error:
            raise ConfigError(f"{agent} cannot be exported: {error}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return target


def adapter_of(run: Path, agent: str, version: int | None) -> tuple[int, dict[str, bytes]]:
    """The number and the files of one of an agent's versions. RunDirectoryError says which there are."""
    home = run / "adapters" / agent
    if not agent or "/" in agent or not home.is_dir():
        there = sorted(each.name for each in (run / "adapters").glob("*"))
        raise RunDirectoryError(
            f"{run} has no agent {agent!r}; it has {', '.join(there) or 'none: is it a run directory?'}"
        )
    numbers = sorted(int(each.name[1:]) for each in home.iterdir() if re.fullmatch(r"v\d{6,}", each.name))
    if not numbers or (version is not None and version not in numbers):
        raise RunDirectoryError(f"{agent} has no version {version}; it has {', '.join(map(str, numbers)) or 'none'}")
    number = numbers[-1] if version is None else version
    directory = home / f"v{number:06d}"
    with blamed(directory):
        return number, {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def _named(files: Mapping[str, bytes], base: str, directory: Path) -> dict[str, bytes]:
    """The adapter says where its base model is: a hub's name, or the directory on this machine."""
    config = json.loads(files[ADAPTER_CONFIG])
    local = base == "demo" or Path(base).expanduser().exists()
    config["base_model_name_or_path"] = str(directory.resolve()) if local else base
    return {**files, ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True).encode()}


def _merge(base: Path, files: Mapping[str, bytes], target: Path) -> None:
    """Importing torch happens here and nowhere earlier."""
    from tinker.engines.torch.merging import merge

    merge(base, files, target)
