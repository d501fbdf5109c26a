"""What the processes of a program own on this machine, taken while it runs, and what of it is left afterwards."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SHARED = "/dev/shm/"
GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


@dataclass(slots=True)
class Owned:
    """Processes, by number and start; unix sockets in the file system; files of shared memory that were not there `before`."""

    processes: set[psutil.Process] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    before: frozenset[str] = field(default_factory=lambda: frozenset(map(str, Path(SHARED).iterdir())))

    def look(self, *roots: int) -> None:
        """Add what these processes and all that they have started own now."""
        for root in roots:
            with suppress(*GONE):
                process = psutil.Process(root)
                for each in (process, *process.children(recursive=True)):
                    self.processes.add(each)
                    self._look_at(each)

    def _look_at(self, process: psutil.Process) -> None:
        with suppress(*GONE):
            bound = {str(each.laddr) for each in process.net_connections("unix")}
            self.sockets |= {path for path in bound if path.startswith("/")}
            mapped = {each.path for each in process.memory_maps()}
            mapped |= {each.path for each in process.open_files()}
            made = {path for path in mapped if path.startswith(SHARED) and not path.endswith("(deleted)")}
            self.shared |= {path for path in made if path not in self.before}

    def left(self) -> list[str]:
        """What is still there."""
        alive = [f"process {each.pid} {each.name()}" for each in self.processes if _alive(each)]
        files = [path for path in sorted(self.sockets | self.shared) if os.path.lexists(path)]
        return alive + files

    def end(self) -> None:
        """Remove what is left, for the tests that leave something."""
        for process in self.processes:
            with suppress(*GONE):
                process.kill()
        for path in self.sockets | self.shared:
            Path(path).unlink(missing_ok=True)


def _alive(process: psutil.Process) -> bool:
    with suppress(*GONE):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
