"""A system in one process whose coordinator dies and is started again with the same journal, on a clock that runs fast."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from system_world import World

from coordinator.app.arrays import Arrays
from coordinator.app.daemon import Daemon
from coordinator.app.journal import Recorder, open_journal
from coordinator.core.coordinator import Coordinator
from coordinator.core.run import Sends
from tinker.protocol.values import PeerName
from tinker.runtime.journal import Journal
from tinker.runtime.transport import MemoryNetwork, Transport

SPEED = 25.0  # seconds of this clock in a real one


class FastClock:
    """The machine's clock, sped up: leases and pauses are over sooner."""

    def now(self) -> float:
        return time.monotonic() * SPEED

    async def sleep_until(self, t: float) -> None:
        await anyio.sleep(max(0.0, t - self.now()) / SPEED)


class Killed(Exception):
    """The coordinator's process is gone."""


@dataclass(slots=True)
class Dying(Recorder):
    """Dies at its `at`-th input, or at the write of the burst that this input is in: before it or after it, and before anything is sent."""

    at: int = 0
    when: str = "input"
    inputs: int = 0

    def _keep(self, sends: Sends, now: float, kind: str, *peer: Any, **what: Any) -> Sends:
        kept = Recorder._keep(self, sends, now, kind, *peer, **what)
        if kind != "tick":
            self.inputs += 1
            if self.inputs == self.at and self.when == "input":
                raise Killed
        return kept

    def commit(self) -> None:
        due = self.when == "write" and self.inputs >= self.at > 0
        Recorder.commit(self)
        if due:
            raise Killed


@dataclass(slots=True)
class Restarting:
    """`lives`: the recorder of each life of the coordinator. `broken`: invariants that did not hold after a life.
    `forgets`: each life begins with an empty journal."""

    world: World
    journal: Path
    deaths: list[tuple[int, str]]
    lives: list[Dying] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    forgets: bool = False

    async def serve(self, network: Transport, wrap: Callable[[Any], Any]) -> None:
        """Live, die, and be started again, until there is no death left; then live until cancelled."""
        while True:
            if self.forgets and self.lives:
                self.journal = self.journal.with_name(f"journal-{len(self.lives)}")
            at, when = self.deaths.pop(0) if self.deaths else (0, "input")
            core = Coordinator(PeerName("coordinator"))
            opened = open_journal(self.journal, core, self.world.clock.now())
            recorder = Dying(core, opened.journal, opened._number, at=at, when=when)
            self.lives.append(recorder)
            listener = wrap(network.listen("coordinator"))
            daemon = Daemon(core, listener, self.world.clock, recorder=recorder, arrays=Arrays(self.journal))
            self.world.daemon = daemon
            try:
                await daemon.serve()
                return
            except* Killed:
                await listener.aclose()
            finally:
                self.broken += core.violations() if not at else []
                assert isinstance(opened.journal, Journal)
                opened.journal.close()


@asynccontextmanager
async def restarting(
    place: Path, *deaths: tuple[int, str], wrap: Callable[[Any], Any] = lambda listener: listener
) -> AsyncIterator[Restarting]:
    """A coordinator that dies like this; on exit no invariant may be broken."""
    network = MemoryNetwork()
    async with anyio.create_task_group() as tasks:
        made = World(network, "coordinator", None, None, place, tasks, "memory", FastClock())  # type: ignore[arg-type]
        life = Restarting(made, place / "journal", list(deaths))
        tasks.start_soon(life.serve, network, wrap, name="coordinator")
        try:
            yield life
        finally:
            for number in range(len(made.servers)):
                made.stop(number)
            tasks.cancel_scope.cancel()
    assert life.broken == []
