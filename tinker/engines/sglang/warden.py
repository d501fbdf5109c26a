"""Runs one command and never leaves it, or anything it started, behind. A program of its own: `warden.py GRACE COMMAND...`.

Whoever starts it holds its standard input. When that closes, because it was told to or because its parent is gone (SIGKILL too), or at
SIGTERM, the command gets SIGTERM, so that it can end its own children in order; after GRACE seconds, or when it has ended, whatever is
left of its process group gets SIGKILL. If the warden itself is killed, the kernel kills the command. It ends as the command did. Only the
standard library, so that it starts at once. Linux.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL = 0.2  # seconds between looks at what is left
_libc = ctypes.CDLL(None, use_errno=True)


def main(grace: float, command: list[str]) -> int:
    """Run it; its exit code, or 128 + the signal that ended it."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # grandchildren whose parent dies become ours
    told = signal_pipe()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent, close_fds=True
    )
    until = None
    watched = [told, sys.stdin.fileno()]
    while child.poll() is None:
        if until is None and select.select(watched, [], [], None)[0]:
            _drain(told)
            if child.poll() is None and (_stopping or _closed(sys.stdin.fileno())):
                until = time.monotonic() + grace
                child.terminate()
        elif until is not None:
            if time.monotonic() > until:
                break
            time.sleep(POLL)
    _sweep(child.pid)
    code = child.wait()
    return code if code >= 0 else 128 - code


_stopping: list[int] = []


def signal_pipe() -> int:
    """A descriptor that can be read when a child has ended or we were told to stop."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: _stopping.append(number))
    return reader


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        os.read(descriptor, 4096)


def _closed(descriptor: int) -> bool:
    """Whether whoever holds the other end is gone; nobody writes there."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 1) == b""


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _sweep(pid: int) -> None:
    """Whatever is left of the group, and of those that became ours, goes now."""
    _signal_group(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for orphan in _children():
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        try:
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                if found is None or found.si_pid == pid:
                    break
                os.waitpid(found.si_pid, 0)
        except ChildProcessError:
            return
        if not [each for each in _children() if each != pid]:
            return
        time.sleep(POLL)


def _children() -> list[int]:
    """Pids whose parent we are."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
        return [int(pid) for pid in file.read().split()]
    return []


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
