"""Start the daemons of a local run as processes of this machine, watch them, and never leave one behind.

Children run in sessions of their own (a Ctrl-C in the terminal reaches only us, and we drain), say on stdout when they are ready, log to
files, and leave by themselves if we are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process

from coordinator.app.access import VARIABLES
from tinker.runtime.clock import Clock
from tinker.runtime.supervision import Intensity, Restart

READY = 180.0  # seconds a child may take until it is ready (a large model loads slowly)
GRACE = 10.0
RESTART = Restart(times=3, within=60.0)  # how often a child that ends is started again


class ProcessDied(Exception):
    """A child ended although nobody told it to; the message has its name, exit code or signal, and the last lines of its log."""


@dataclass(slots=True)
class Child:
    """One daemon process. `restarts`: how often it has been started again. `patience`: seconds that it may take until it is ready."""

    name: str
    process: Process
    log: Path
    arguments: Sequence[str] = ()
    restarts: int = 0
    patience: float = READY

    @classmethod
    async def start(cls, name: str, arguments: Sequence[str], log: Path, patience: float = READY) -> Child:
        """Start `opentinker ARGUMENTS` with this interpreter."""
        return cls(name, await _open(arguments, log), log, arguments, patience=patience)

    async def again(self) -> None:
        """Start it again, after it has ended."""
        await self.process.aclose()
        self.process = await _open(self.arguments, self.log)
        self.restarts += 1

    async def ready(self, patience: float = READY) -> str:
        """Wait until the child says where it is. ProcessDied if it ends before, or takes too long."""
        assert self.process.stdout is not None
        said = b""
        with anyio.move_on_after(patience):
            try:
                while b"\n" not in said:
                    said += await self.process.stdout.receive()
                address: str = json.loads(said.partition(b"\n")[0])["ready"]
                return address
            except anyio.EndOfStream:
                await self.process.wait()
                raise ProcessDied(self.story()) from None
        await self.stop()
        raise ProcessDied(f"{self.name} was not ready after {patience:.0f} s; its log is {self.log}")

    async def died(self) -> str:
        """Wait until the child has ended; returns how."""
        await self.process.wait()
        return self.story()

    async def stop(self, grace: float = GRACE) -> None:
        """SIGTERM, then SIGKILL after the grace time. Returns when the process is gone."""
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.terminate()
                with anyio.move_on_after(grace):
                    await self.process.wait()
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
            await self.process.aclose()

    def kill(self) -> None:
        """SIGKILL at once."""
        if self.process.returncode is None:
            self.process.kill()

    def story(self) -> str:
        code = self.process.returncode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({_signal_name(-code)})"
        how += f" (it had been started again {self.restarts} times)" if self.restarts else ""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return f"the {self.name} process {how}; the end of its log ({self.log}):\n  " + "\n  ".join(lines)


async def _open(arguments: Sequence[str], log: Path) -> Process:
    command = [sys.executable, "-m", "coordinator.cli.main", *arguments, "--parent", str(os.getpid())]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in VARIABLES},  # ours need no keys
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_root()), os.environ.get("PYTHONPATH", "")))),
    }
    with log.open("ab") as file:
        return await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stderr=file, env=environment, start_new_session=True
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


async def ready(child: Child, others: Sequence[Child], patience: float = READY) -> str:
    """Like `child.ready()`, but ProcessDied as soon as any of the others ends: the child might wait for it."""
    outcome: list[str | ProcessDied] = []

    async def wait() -> None:
        try:
            outcome.append(await child.ready(patience))
        except ProcessDied as error:
            outcome.append(error)
        tasks.cancel_scope.cancel()

    async def watch(other: Child) -> None:
        outcome.append(ProcessDied(await other.died()))
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for other in others:
            if other is not child:
                tasks.start_soon(watch, other, name=f"watch {other.name}")
        tasks.start_soon(wait, name=f"wait for {child.name}")
    if isinstance(outcome[0], ProcessDied):
        raise outcome[0]
    return outcome[0]


async def keep_running(
    child: Child, others: Sequence[Child], clock: Clock, note: Callable[[str], None], give_up: Callable[[str], None]
) -> None:
    """Start the child again whenever it ends, unless it ends too often: then `give_up` hears how. Cancel it before the child is stopped."""
    intensity = Intensity(RESTART)
    while True:
        story = await child.died()
        pause = intensity.failed(clock.now())
        if pause is None:
            give_up(story)
            return
        note(f"{story.partition(';')[0]}; it is started again")
        await clock.sleep_until(clock.now() + pause)
        await child.again()
        with suppress(ProcessDied):  # we are told of its own end above, and others of that of the others
            await ready(child, others, child.patience)


async def first_dead(children: Sequence[Child], patience: float = 1.0) -> Child | None:
    """The first child that has ended, or ends within `patience` seconds: a broken connection is often seen before the end itself."""
    with anyio.move_on_after(patience if children else 0.0):
        async with anyio.create_task_group() as tasks:

            async def watch(child: Child) -> None:
                await child.process.wait()
                tasks.cancel_scope.cancel()

            for child in children:
                tasks.start_soon(watch, child, name=f"watch {child.name}")
    return next((child for child in children if child.process.returncode is not None), None)


def _root() -> Path:
    """Where our packages lie: children import these and no others, whatever else is installed."""
    return Path(__file__).resolve().parents[2]
