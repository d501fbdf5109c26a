"""The versions that are served, as files of ours, and what every part of the engine knows of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from tinker.engines.checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CLOSED, not_loaded
from tinker.engines.engine import EngineError, Files
from tinker.engines.sglang import wire
from tinker.engines.sglang.api import ServerFault, weights_name
from tinker.engines.sglang.fleet import Fleet
from tinker.engines.sglang.replica import Replica, State
from tinker.engines.sglang.settings import Servers
from tinker.protocol.values import BASE, PolicyName, PolicyVersion


@dataclass(slots=True, eq=False)
class Held:
    """Weights that are served, as files in `directory`, under their name on every server. `full`: a whole model. `open`: requests under
    way. `accepted`: some server has them; until then nobody is answered. `refused`: who would not take them, and why."""

    version: PolicyVersion
    digest: str
    name: str
    directory: Path
    full: bool = False
    accepted: bool = False
    open: int = 0
    refused: dict[Replica, ServerFault] = field(default_factory=dict)


class Registry:
    """`held`: what is served, the base model too. `retiring`: what is refused already and waits for its last requests."""

    def __init__(self, fleet: Fleet, settings: Servers, spool: Path, base_label: str) -> None:
        self.fleet = fleet
        self.settings = settings
        self.base = Held(BASE, base_label, base_label, spool, full=True, accepted=True)
        self.held: dict[PolicyVersion, Held] = {BASE: self.base}
        self.retiring: list[Held] = []
        self._spool = spool
        self._closed = False

    def close(self) -> None:
        """Whoever waits for a server gets an EngineError."""
        self._closed = True
        for replica in self.fleet.replicas:
            replica.lost()
        self.fleet.tell()

    @property
    def adapters(self) -> list[Held]:
        return [held for held in self.held.values() if not held.full]

    def find(self, version: PolicyVersion) -> Held:
        """EngineError unless it is served."""
        held = self.held.get(version)
        if held is None or not held.accepted:
            raise not_loaded({known: each for known, each in self.held.items() if each.accepted}, version)
        return held

    def weights_of(self, owner: PolicyName) -> Held:
        """What a server of this policy has as its base weights."""
        own = [held for held in self.held.values() if held.full and held.version.policy == owner]
        return max(own, key=lambda held: held.version, default=self.base)

    def check_place(self, held: Held) -> None:
        """EngineError if no server is meant for these weights, or none is left, or we are closed."""
        if self._closed:
            raise EngineError(CLOSED)
        replicas = self.fleet.replicas
        owner = held.version.policy if held.full else ""
        if all(each.owner != owner for each in replicas):
            raise EngineError(
                f"{held.version} needs a server of {owner or 'the base model'}; all {len(replicas)} belong to policies with full "
                "weights: start more replicas"
            )
        if all(each.state is State.GONE for each in replicas):
            raise EngineError(f"no SGLang server is left: {self.fleet.story()}; start one again")

    async def keep(self, version: PolicyVersion, digest: str, files: Files, full: bool) -> Held:
        """Write the files where servers may read them."""
        name = weights_name(version, digest)
        held = Held(version, digest, name, self._spool / name, full)
        await anyio.to_thread.run_sync(_write, held.directory, dict(files))
        return held

    def drop(self, held: Held) -> None:
        """Its files are needed no more."""
        shutil.rmtree(held.directory, ignore_errors=True)

    def by_file(self, replica: Replica) -> bool:
        return self.settings.transfer.by_file(replica.address.url)

    async def give(self, replica: Replica, held: Held, payload: bytes | None = None) -> None:
        """Load one adapter there; `payload` if it was made already. A refusal is noted, and raised. If the adapter was unloaded meanwhile,
        it is only left over there."""
        try:
            if self.by_file(replica):
                await replica.address.load_adapter(held.name, str(held.directory))
            else:
                if payload is None:
                    payload = await anyio.to_thread.run_sync(adapter_payload, held.directory)
                config = json.loads((held.directory / ADAPTER_CONFIG).read_bytes())
                await replica.address.load_adapter_tensors(held.name, config, payload)
        except ServerFault as fault:
            held.refused[replica] = fault
            self.fleet.tell()
            raise
        held.refused.pop(replica, None)
        if self.held.get(held.version) is held:
            replica.held[held.version] = held.name
        else:
            replica.leftover.add(held.name)


def adapter_payload(directory: Path) -> bytes:
    """The adapter's tensors as they go over the wire."""
    with (directory / ADAPTER_WEIGHTS).open("rb") as file:
        return wire.pickled(dict(wire.read_safetensors(file)))


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Beside, then renamed: a server never sees half of it."""
    beside = directory.with_name(f".{directory.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name, data in files.items():
        (beside / name).write_bytes(data)
    shutil.rmtree(directory, ignore_errors=True)
    beside.rename(directory)
