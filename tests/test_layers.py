"""The layers: imports go down, heavy libraries stay in their folder, and everything but the torch engine works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.app.names import PACKAGES

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

BELOW = {  # folder: the folders of this project it may import besides itself; the longest prefix counts
    "tinker": (),
    "envs": ("tinker",),
    "coordinator/core": ("tinker",),
    "agents": ("coordinator/core", "envs", "tinker"),
    "scenarios": ("agents", "coordinator/core", "envs", "tinker"),
    "coordinator": ("scenarios", "agents", "envs", "tinker"),
}
ONLY_IN = {  # library: where it may be imported
    "torch": ("tinker/engines/torch", "tinker/engines/sglang/cpu_server.py", "tinker/algorithms/losses.py"),
    "transformers": ("tinker/engines/torch", "tinker/algorithms/losses.py"),
    "peft": ("tinker/engines/torch", "tinker/algorithms/losses.py"),
    "accelerate": ("tinker/engines/torch",),
    "safetensors.torch": ("tinker/engines/torch",),
    "sglang": ("tinker/engines/sglang/cpu_server.py",),
    "httpx": ("tinker/engines/sglang/server.py",),
    "zmq": ("tinker/runtime/transport",),
    "msgpack": ("tinker/runtime/codec.py",),
    "starlette": ("coordinator/web",),
    "uvicorn": ("coordinator/web",),
    "prometheus_client": ("coordinator/web",),
}
NEVER_IN = {  # folder: libraries it may not import
    "scenarios": ("time",),
    "coordinator/core": (
        "anyio",
        "asyncio",
        "time",
        "random",
        "logging",
        "structlog",
        "pydantic",
        "threading",
        "datetime",
    ),
    "envs": ("anyio", "asyncio"),
}
HEAVY = ("torch", "transformers", "peft", "accelerate")
NEEDS_TORCH = ("tinker/engines/torch", "tinker/engines/sglang/cpu_server.py", "tinker/algorithms/losses.py")


def imports(text: str, package: str) -> list[str]:
    """Dotted names that this source imports directly, wherever the statement stands."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found += [f"{source}.{alias.name}" for alias in node.names]
    return found


def within(name: str, folders: tuple[str, ...] | str) -> bool:
    """Whether a dotted name or a path lies in one of these (paths or dotted names)."""
    parts = name.replace("/", ".").removesuffix(".py").split(".")
    wanted = [folders] if isinstance(folders, str) else folders
    return any(parts[: len(w)] == w for w in (f.replace("/", ".").removesuffix(".py").split(".") for f in wanted))


def problems(path: str, text: str) -> list[str]:
    """What this file (path from the root) imports and may not."""
    package = ".".join(Path(path).parent.parts)
    home = max((folder for folder in BELOW if within(path, folder)), key=len)
    found = []
    for name in imports(text, package):
        if within(name, PACKAGES) and not within(name, (home, *BELOW[home])):
            found.append(f"{path} imports {name}: {home} may import {', '.join(BELOW[home]) or 'nothing above'}")
        for library, folders in ONLY_IN.items():
            if within(name, library) and not within(path, folders):
                found.append(f"{path} imports {name}: {library} belongs in {', '.join(folders)}")
        for folder, libraries in NEVER_IN.items():
            if within(path, folder) and within(name, libraries):
                found.append(f"{path} imports {name}: never in {folder}")
    return found


def test_every_import_goes_down_and_stays_in_its_place() -> None:
    found = [line for file in FILES for line in problems(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tinker/x.py", "from scenarios import Table"),
        ("tinker/x.py", "def f():\n    import coordinator.core.barrier"),
        ("envs/x.py", "import agents"),
        ("envs/x.py", "import anyio"),
        ("agents/x.py", "from scenarios.table import Table"),
        ("agents/players/x.py", "from ...coordinator import app"),
        ("agents/x.py", "import torch.nn as nn"),
        ("agents/x.py", "import zmq"),
        ("scenarios/x.py", "from coordinator.app import config"),
        ("scenarios/x.py", "from time import monotonic"),
        ("coordinator/core/x.py", "from coordinator.app.config import RunConfig"),
        ("coordinator/core/x.py", "import random"),
        ("coordinator/core/x.py", "from envs import Nim"),
        ("coordinator/app/x.py", "from safetensors.torch import load_file"),
        ("tinker/server/x.py", "import msgpack"),
        ("coordinator/app/x.py", "from starlette.routing import Route"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str) -> None:
    assert problems(path, text) != []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "coordinator/app/x.py",
            "from coordinator.core.barrier import arrive\nfrom scenarios import Table\nimport time",
        ),
        ("agents/x.py", "from coordinator.core.order import due\nimport envs"),
        ("tinker/engines/torch/x.py", "import torch, peft\nfrom . import lora"),
        ("tinker/runtime/codec.py", "import msgpack"),
        ("scenarios/x.py", "import timeit"),
    ],
)
def test_a_right_import_is_none(path: str, text: str) -> None:
    assert problems(path, text) == []


def test_everything_but_the_torch_engine_is_importable_where_torch_is_not() -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in FILES
        if not within(str(file.relative_to(ROOT)), NEEDS_TORCH) and file.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(modules) > 50
