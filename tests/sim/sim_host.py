"""A simulated host: the real `Play` (client, training, players), with its disk in memory and a fixed process id."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from sim_loop import LoopClock
from sim_net import SimTransport
from sim_scenarios import SCENARIOS
from sim_store import Disks, SimBulk, SimStore

from coordinator.app import further, local, training
from coordinator.app.config import BARRIERS, RunConfig, resolve
from coordinator.app.local import Play, RunRequest
from coordinator.app.progress import Silent
from coordinator.app.rundir import Exit, RunDirectory, RunDirectoryError
from tinker.protocol.episodes import Recording
from tinker.protocol.values import RunId
from tinker.tokens import ChatTemplate


@dataclass
class SimDirectory:
    """A run directory that remembers. `full`: whether its disk takes nothing more."""

    path: Path
    full: Callable[[], bool]
    adapters: dict[tuple[str, int], Mapping[str, bytes]] = field(default_factory=dict)
    rows: list[Mapping[str, object]] = field(default_factory=list)
    recordings: dict[str, list[Recording]] = field(default_factory=dict)
    checkpoint: Mapping[str, bytes] = field(default_factory=dict)

    def save_adapter(self, agent: str, version: int, files: Mapping[str, bytes]) -> Path:
        self._check()
        known = self.adapters.setdefault((agent, version), files)
        assert known == files, f"{agent} version {version} came with other bytes"
        return self.path

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        self._check()
        self.rows += rows

    @property
    def written(self) -> int:
        return len(self.rows)

    def save_checkpoint(self, files: Mapping[str, bytes]) -> None:
        self._check()
        self.checkpoint = files

    def recordings_path(self, phase: str, round: int) -> Path:
        self._check()
        return cast(Path, (self, f"{phase}-{round}"))

    def write_text(self, name: str, text: str) -> Path:
        self._check()
        return self.path / name

    def write_bytes(self, name: str, data: bytes) -> Path:
        self._check()
        return self.path / name

    def finish(self, exit: Exit) -> Path:
        return self.write_text("exit.json", exit.reason)

    def _check(self) -> None:
        if self.full():
            raise RunDirectoryError(f"cannot write {self.path}: no space left on device; free some")


def keep_recordings(place: Any, recordings: Sequence[Recording]) -> None:
    directory, name = place
    directory.recordings[name] = list(recordings)


class SimPlay(Play):
    """`Play` without signals, and without the pages at its end."""

    async def run(self) -> Exit:
        return await self._outcome()


def make_play(
    number: int,
    rng: random.Random,
    transport: SimTransport,
    clock: LoopClock,
    disks: Disks,
    given: Mapping[str, object],
) -> SimPlay:
    """A host with a run that the seed chose, but for what is given."""
    scenario = rng.choice(SCENARIOS)
    machine = f"machine of host{number}"
    directory = SimDirectory(Path(f"run{number}"), lambda: machine in disks.full)
    request = RunRequest(run_config(rng, number, given), scenario, cast(RunDirectory, directory), "coordinator")
    return SimPlay(request, Silent(), clock, transport, name=f"host{number}", machine=machine)


_CONFIGS: dict[str, RunConfig] = {}


def run_config(rng: random.Random, number: int, fixed: Mapping[str, object]) -> RunConfig:
    """A small run. Equal choices share one value: validation is what costs here."""
    given: dict[str, Any] = {
        "scenario": "simulated",
        "seed": number,
        "rounds": rng.choice((1, 2, 2, 3)),
        "groups": rng.choice((1, 2)),
        "group_size": rng.choice((2, 3)),
        "evaluate_every": rng.choice((0, 0, 1, 2)),
        "update_order": rng.choice(("together", "in_turn")),
        "max_failed_episodes": 1.0,
        "turn_deadline": rng.choice((4.0, 15.0)),
        "episode_deadline": 60.0,
        "worker_deadline": 60.0,
        "concurrency": rng.choice((2, 64)),
        "engine": "scripted",
        "learning": {"max_tokens": 4, "every": rng.choice((1, 1, 1, 2))},
    }
    # not from `rng`: a history whose agents are in step is what it would be without this
    lag = given["learning"]["max_lag"] = random.Random(repr(given)).choice((0, 0, 1, 2))
    if rng.random() < 0.3:
        given["barriers"] = barrier_rules(
            rng, BARRIERS if lag == 0 else [each for each in BARRIERS if "update" not in each]
        )
    given |= fixed
    key = repr(given)
    if key not in _CONFIGS:
        _CONFIGS[key] = resolve(given)
    return _CONFIGS[key]


def barrier_rules(rng: random.Random, barriers: Sequence[str]) -> dict[str, Any]:
    """Deadlines for about half of these barriers."""
    rules: dict[str, Any] = {}
    for barrier in barriers:
        if rng.random() < 0.5:
            straggler = rng.choice(("wait", "drop", "drop", "drop", "fail"))
            rules[barrier] = {"deadline": rng.choice((0.5, 2.0, 6.0)), "straggler": straggler}
    return rules


_Tokenizer = local.Tokenizer
_TOKENIZERS: dict[bytes, Any] = {}
_TEMPLATES: dict[str, ChatTemplate] = {}


def shared_tokenizer(data: bytes) -> Any:
    if data not in _TOKENIZERS:
        _TOKENIZERS[data] = _Tokenizer.from_bundle(data)
    return _TOKENIZERS[data]


def shared_template(tokenizer: Any) -> ChatTemplate:
    """Compiled once for the whole process: it is a function of the tokenizer's files alone."""
    if tokenizer.digest not in _TEMPLATES:
        _TEMPLATES[tokenizer.digest] = ChatTemplate(tokenizer)
    return _TEMPLATES[tokenizer.digest]


@contextmanager
def simulated_disks(disks: Disks) -> Iterator[None]:
    """While it is entered, hosts keep bundles and run directories in memory and have a process id that never changes."""

    def store(directory: Path, machine: str = "", **_: Any) -> SimStore:
        return SimStore(disks, machine, f"data {machine}")

    def bulk(connect: Any, machine: str = "", **_: Any) -> SimBulk:
        return SimBulk(disks, machine)

    with (
        mock.patch.object(local, "BundleStore", store),
        mock.patch.object(local, "BulkClient", bulk),
        mock.patch.object(local, "ChatTemplate", shared_template),
        mock.patch.object(local, "Tokenizer", SimpleNamespace(from_bundle=shared_tokenizer)),
        mock.patch.object(local, "run_id", lambda path: RunId(path.name)),
        mock.patch.object(local.os, "getpid", lambda: 1),
        mock.patch.object(local.tempfile, "TemporaryDirectory", lambda **_: nullcontext("spool")),
        mock.patch.object(training, "write_recordings", keep_recordings),
        mock.patch.object(further, "BulkClient", bulk),
        mock.patch.object(further, "ChatTemplate", shared_template),
        mock.patch.object(further, "Tokenizer", SimpleNamespace(from_bundle=shared_tokenizer)),
    ):
        yield
