"""What `opentinker doctor` looks at: can this machine run, train and serve, and if not, what is to be done about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from coordinator.app.names import clashes
from tinker import __version__

NEEDED = ("anyio", "pyzmq", "msgpack", "pydantic", "numpy", "tokenizers", "safetensors")
TRAINING = ("torch", "transformers", "peft")
PORTS = {7654: "coordinator --bind", 7655: "coordinator --http"}
GIB = 1 << 30
LEAST_DISK, LEAST_MEMORY = 2 * GIB, 2 * GIB
HUB = "https://huggingface.co"
PATIENCE = 5.0  # seconds the hub may take to answer
TORCH = """
import json, os, torch
print(json.dumps({
    "threads": torch.get_num_threads(),
    "cuda": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())],
    "blas": "mkl" if torch.backends.mkl.is_available() else "openblas" if "openblas" in torch.__config__.show().lower() else "other",
}))
"""
IMPORTING = 120.0  # seconds that torch may take to be imported

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Line:
    """One thing looked at. `do`: what would change it ("" if nothing needs to)."""

    state: State
    what: str
    found: str
    do: str = ""


def examine(place: Path) -> Iterator[Line]:
    """Everything, in the order in which it matters. `place`: where runs would be written."""
    for look in (
        _python,
        _clashes,
        _packages,
        _training,
        _torch,
        _threads,
        _memory,
        lambda: _disk(place),
        _ports,
        _sglang,
        _hub,
    ):
        yield from look()


def _python() -> Iterator[Line]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, opentinker {__version__}"
    yield Line("ok", "python", found)


def _clashes() -> Iterator[Line]:
    found = clashes()
    for each in found:
        yield Line("problem", "package names", each.partition(". ")[0], each.partition(". ")[2])
    if not found:
        yield Line("ok", "package names", "no other distribution provides packages of these names")


def _packages() -> Iterator[Line]:
    missing = [name for name in NEEDED if _version(name) is None]
    if missing:
        yield Line("problem", "packages", f"missing: {', '.join(missing)}", "pip install -c constraints.txt opentinker")
    else:
        yield Line("ok", "packages", ", ".join(f"{name} {_version(name)}" for name in NEEDED))


def _training() -> Iterator[Line]:
    missing = [name for name in TRAINING if _version(name) is None]
    if missing:
        yield Line(
            "note",
            "training",
            f"missing: {', '.join(missing)}: this machine can coordinate, play and replay, but not train",
            "pip install -c constraints.txt 'opentinker[train]'",
        )
    else:
        yield Line("ok", "training", ", ".join(f"{name} {_version(name)}" for name in TRAINING))


def _torch() -> Iterator[Line]:
    if _version("torch") is None:
        return
    try:
        asked = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=IMPORTING)
        told: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        last = [f"{error}"] if isinstance(error, subprocess.TimeoutExpired) else asked.stderr.strip().splitlines()[-1:]
        why = "".join(last) or f"exit code {asked.returncode}"
        yield Line(
            "problem",
            "torch",
            f"cannot be imported: {why}",
            "install it again: pip install --force-reinstall -c constraints.txt torch",
        )
        return
    devices = ", ".join(told["cuda"]) or "the CPU alone"
    yield Line("ok", "devices", f"{devices}; torch uses {told['threads']} threads and {told['blas']}")


def _threads() -> Iterator[Line]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    found = f"{cores} cores, load {busy:.1f}, OMP_WAIT_POLICY {policy or 'not set'} (task servers of `opentinker run` set PASSIVE)"
    if policy.upper() == "ACTIVE":
        yield Line("note", "threads", found, "unset OMP_WAIT_POLICY: threads that spin slow everything else down")
    elif busy > 2 * cores:
        yield Line(
            "note",
            "threads",
            found,
            "this machine is busy with something else: runs will take longer than the pages say",
        )
    else:
        yield Line("ok", "threads", found)


def _memory() -> Iterator[Line]:
    free = psutil.virtual_memory().available
    found = f"{free / GIB:.1f} GiB available"
    if free < LEAST_MEMORY:
        yield Line("problem", "memory", found, f"free some: the demo needs about {LEAST_MEMORY / GIB:.0f} GiB")
    else:
        yield Line("ok", "memory", found)


def _disk(place: Path) -> Iterator[Line]:
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        yield Line(
            "problem", "disk", f"{place} cannot be written to", "go to another directory, or name one with --out"
        )
    elif free < LEAST_DISK:
        yield Line("problem", "disk", found, "free some space, or name another place with --out")
    else:
        yield Line("ok", "disk", found)


def _ports() -> Iterator[Line]:
    for port, use in PORTS.items():
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError as error:
                yield Line(
                    "note",
                    f"port {port}",
                    f"cannot be used: {error.strerror}",
                    f"if no coordinator is meant to be there, choose another with `opentinker {use}`",
                )
            else:
                yield Line("ok", f"port {port}", f"free for `opentinker {use}`")


def _sglang() -> Iterator[Line]:
    own = Path(".venv-sglang")
    if find_spec("sglang") is not None:
        yield Line("ok", "sglang", f"{_version('sglang')} is in this environment")
    elif found := sorted(own.glob("lib/python*/site-packages/sglang-*.dist-info")):
        yield Line("ok", "sglang", f"{found[-1].name.removesuffix('.dist-info')} is in {own}")
    else:
        yield Line(
            "note",
            "sglang",
            f"neither in this environment nor in {own}",
            "only needed to serve with SGLang; it may have an environment of its own, on any machine",
        )


def _hub() -> Iterator[Line]:
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        yield Line(
            "note", "hub", "HF_HUB_OFFLINE is set: nothing is fetched", "unset it to fetch models by their hub names"
        )
        return
    try:
        with urllib.request.urlopen(urllib.request.Request(HUB, method="HEAD"), timeout=PATIENCE):
            yield Line("ok", "hub", f"{HUB} answers")
    except (OSError, ValueError) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        yield Line(
            "note", "hub", f"{HUB} cannot be reached ({why})", "`--model demo` and model directories need no hub"
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
