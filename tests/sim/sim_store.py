"""The data plane of the simulation: bundles in memory, one disk for each machine, copied in virtual time. A disk may be full."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from tinker.protocol.values import BlobRef
from tinker.runtime.bulk import BulkError, BundleExists, StoreUnwritable
from tinker.runtime.bundles import check_digest, check_name, digest_of


@dataclass
class Disks:
    """What lies where. `full`: machines whose disk takes nothing more now; `gone`: endpoints whose process has died.
    `digests`: of every bundle there ever was, by place: what is published never changes."""

    rng: random.Random
    bundles: dict[str, dict[str, tuple[BlobRef, dict[str, bytes]]]] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    did: Counter[str] = field(default_factory=Counter)

    def on(self, machine: str) -> dict[str, tuple[BlobRef, dict[str, bytes]]]:
        return self.bundles.setdefault(machine, {})


class SimStore:
    """`BundleStore` on a simulated disk; the process that serves it has the endpoint `endpoint`."""

    def __init__(self, disks: Disks, machine: str, endpoint: str) -> None:
        self.machine = machine
        self.endpoint = endpoint
        self._disks = disks

    def put(self, name: str, files: Mapping[str, bytes]) -> BlobRef:
        digest = digest_of(files)
        there = self._disks.on(self.machine).get(check_name(name))
        if there is not None:
            if there[0].digest != digest:
                raise BundleExists(f"{name} holds another bundle: choose a new name")
            return there[0]
        if self.machine in self._disks.full:
            self._disks.did["refused by a full disk"] += 1
            raise StoreUnwritable(f"no room for bundle {name} on {self.machine}")
        ref = BlobRef(name, digest, sum(map(len, files.values())), self.machine, f"/{name}", self.endpoint)
        self._disks.on(self.machine)[name] = (ref, dict(files))
        return ref

    def remove(self, name: str) -> None:
        self._disks.on(self.machine).pop(name, None)

    def remove_beginning(self, prefix: str) -> None:
        for name in [name for name in self._disks.on(self.machine) if name.startswith(check_name(prefix))]:
            self.remove(name)


class SimBulk:
    """`BulkClient` of a process on `machine`, and `BulkServer` (there is nothing to serve: the disks are the network)."""

    def __init__(self, disks: Disks, machine: str) -> None:
        self._disks = disks
        self._machine = machine

    async def serve(self) -> None:
        await anyio.sleep_forever()

    async def fetch(self, ref: BlobRef) -> dict[str, bytes]:
        await self._travel(ref.machine, ref.endpoint)
        there = self._disks.on(ref.machine).get(ref.name)
        if there is None:
            raise BulkError(f"there is no bundle {ref.name} on {ref.machine}")
        check_digest(ref.name, there[0].digest, ref.digest)
        return dict(there[1])

    async def push(self, endpoint: str, name: str, files: Mapping[str, bytes]) -> BlobRef:
        machine = endpoint.removeprefix("data ")
        await self._travel(machine, endpoint)
        return SimStore(self._disks, machine, endpoint).put(name, files)

    async def _travel(self, machine: str, endpoint: str) -> None:
        if machine == self._machine:
            await anyio.lowlevel.checkpoint()
            return
        await anyio.sleep(self._disks.rng.uniform(0.001, 0.05))
        if endpoint in self._disks.gone:
            await anyio.sleep(5.0)
            self._disks.did["transfers to the dead"] += 1
            raise BulkError(f"{endpoint} said nothing for 5 s: is its task server alive?")
