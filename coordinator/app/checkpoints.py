"""Checkpoints of a run: at the end of a round, everything that it takes to go on with the next one.

A checkpoint holds each agent's training state (weights, optimizer, what its learner remembers), the counters that schedules and version
numbers come from, and how long `metrics.jsonl` was. What is random in a run comes from its seed and the place in it, so nothing more is
needed. It is one file that is there as a whole or not at all; the newest two are kept, and a damaged one is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.app.rundir import RunDirectoryError
from tinker.engines.engine import Files
from tinker.protocol.values import AgentName
from tinker.runtime.plain import PlainError, from_text, to_text

MANIFEST = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent is: its version, the last one it asked to publish, every one it has published, its optimizer's steps."""

    version: int
    asked: int
    published: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """`round`: the last one that is complete. `model`: digest of the base model. `metrics`: bytes of `metrics.jsonl` when it was."""

    round: int
    model: str
    metrics: int
    places: Mapping[AgentName, Place]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`states`: of each agent, the files of its `SaveState`."""

    manifest: Manifest
    states: Mapping[AgentName, Files]


def packed(checkpoint: Checkpoint) -> Files:
    """As the files of one bundle."""
    files = {f"{agent}/{name}": data for agent, state in checkpoint.states.items() for name, data in state.items()}
    return {MANIFEST: to_text(checkpoint.manifest, Manifest).encode(), **files}


def unpacked(files: Files) -> Checkpoint:
    """The checkpoint again. RunDirectoryError if another release has written it."""
    try:
        manifest = from_text(files[MANIFEST].decode(), Manifest)
    except (KeyError, PlainError) as error:
        raise RunDirectoryError(
            f"the checkpoint is not of this release of opentinker ({error}): go on with the one that wrote it"
        ) from error
    states: dict[AgentName, dict[str, bytes]] = {agent: {} for agent in manifest.places}
    for name, data in files.items():
        agent, slash, file = name.partition("/")
        if slash:
            states[AgentName(agent)][file] = data
    return Checkpoint(manifest, states)
