"""Going on with a run that has stopped: its directory is put back to its newest checkpoint, and played on from there.

What was written after the checkpoint belongs to a round that will be played again: rows, recordings and versions of it are removed, so that
nothing is there twice and no number has two meanings.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.app.checkpoints import Checkpoint, unpacked
from coordinator.app.checks import checked
from coordinator.app.config import ConfigError, config_text, merged, read_toml
from coordinator.app.local import RunRequest
from coordinator.app.rundir import Exit, RunDirectory, RunDirectoryError, blamed, read_metrics
from coordinator.app.timeline import rewind_timeline
from scenarios import load_scenario
from tinker.protocol.values import AgentName

RECORDING = re.compile(r"[a-z]+-(\d+)\.jsonl")
VERSION = re.compile(r"v(\d{6,})")


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run directory that is claimed again. `config`: its configuration, as it was resolved. `checkpoint`: None: it begins anew."""

    directory: RunDirectory
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None

    @property
    def round(self) -> int:
        """The last round that is complete; 0: none."""
        return self.checkpoint.manifest.round if self.checkpoint else 0

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far (call `rewind` first)."""
        return read_metrics(self.directory.path)

    def rewind(self) -> None:
        """Remove what was written after the checkpoint."""
        path, manifest = self.directory.path, self.checkpoint.manifest if self.checkpoint else None
        with blamed(path):
            os.truncate(self.directory.metrics, manifest.metrics if manifest else 0)
            for name in ("exit.json", "summary.md", "curves.png", "report.html"):
                (path / name).unlink(missing_ok=True)
            rewind_timeline(path, manifest.round if manifest else -1)
            for recording in (path / "recordings").glob("*.jsonl"):
                found = RECORDING.fullmatch(recording.name)
                if found and (manifest is None or int(found[1]) > manifest.round):
                    recording.unlink()
            for home in (path / "adapters").glob("*"):
                kept = manifest.places.get(AgentName(home.name)) if manifest else None
                self._rewind_adapters(home, kept.version if kept else -1)

    def _rewind_adapters(self, home: Path, newest: int) -> None:
        for directory in home.iterdir():
            found = VERSION.fullmatch(directory.name)
            if found and int(found[1]) > newest:
                shutil.rmtree(directory)
        self.directory.point_to_newest(home)


def resume(path: Path) -> Resumed:
    """Claim the directory of a run that has stopped. RunDirectoryError if it holds none, it still runs, or it is finished."""
    directory = RunDirectory.reopen(path)
    try:
        config = read_toml(path / "config.toml")
    except ConfigError as error:
        raise RunDirectoryError(f"{path} holds no run that can be gone on with: {error}") from error
    files = directory.newest_checkpoint()
    if files is None and any((path / "checkpoints").rglob("*.commit")):
        raise RunDirectoryError(f"all checkpoints in {path / 'checkpoints'} are damaged: start a new run")
    return Resumed(directory, config, unpacked(files) if files is not None else None)


def resumed_request(path: Path, rounds: int | None, coordinator: str, command: str) -> RunRequest | None:
    """The run in this directory, ready to be played on, to `rounds` rounds (None: as many as it was to play).

    The directory is claimed and put back to its newest checkpoint. ConfigError, ScenarioError or RunDirectoryError, and nothing was
    changed, if it cannot go on. None: it was cut off after its last round, before it had said so, and now it has.
    """
    resumed = resume(path)
    given = merged(resumed.config, {} if rounds is None else {"rounds": rounds})
    chosen = load_scenario(str(given.get("scenario", "")))
    config, model = checked(chosen, [given], local=not coordinator)
    if any(config.learning_of(name).max_lag for name in (*chosen.seats, *config.agents)):
        raise RunDirectoryError(
            f"{path} cannot be gone on with: runs whose agents may lag (max_lag) have no checkpoints yet"
        )
    if resumed.checkpoint is None and not config.checkpoint_every:
        raise RunDirectoryError(f"{path} cannot be gone on with: it keeps no checkpoints (checkpoint_every is 0)")
    if resumed.round >= config.rounds and not (path / "exit.json").exists():
        resumed.directory.finish(Exit("finished", 0, f"all {config.rounds} rounds were played"))
        return None
    if resumed.round >= config.rounds:
        raise RunDirectoryError(
            f"{path} has played {resumed.round} rounds, all it was to play: give a larger number with --rounds to play more"
        )
    resumed.rewind()
    if rounds is not None:
        resumed.directory.write_text("config.toml", config_text(config))
    if coordinator:
        model = resumed.checkpoint.manifest.model if resumed.checkpoint else ""
    return RunRequest(
        config, chosen, resumed.directory, coordinator, model, command, resumed.checkpoint, resumed.rows()
    )
