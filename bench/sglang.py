"""How long a version takes to be served by a real SGLang server: all of our `load` against SGLang's own, in turns on one server.

`.venv/bin/python bench/sglang.py .venv-sglang/bin/python [pairs]` prints markdown. SGLang's own is one request that loads a directory which
is there already; ours also checks, hashes and writes the files.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from tinker.engines.sglang import Launch, Servers, SglangEngine
from tinker.engines.torch import TorchEngine
from tinker.models import DEMO
from tinker.protocol.values import LoraSpec, PolicyName, PolicyVersion

RANK = 104  # makes four megabytes on the demo model


async def measure(python: str, pairs: int) -> tuple[int, list[float], list[float]]:
    """Bytes of the adapter; seconds of SGLang's own loads, and of ours."""
    launch = Launch(python=python, max_rank=128, ready=900.0)
    async with SglangEngine(Servers(launch=launch), TorchEngine(str(DEMO)), model=DEMO) as engine:
        files = dict(await engine.attach(PolicyName("ann"), LoraSpec(rank=RANK)))
        tensors = load(files["adapter_model.safetensors"])
        server = engine.replicas[0].address
        theirs, ours = [], []
        with tempfile.TemporaryDirectory() as place:
            for pair in range(pairs):
                changed = {name: value + np.float32(pair) for name, value in tensors.items()}
                files["adapter_model.safetensors"] = save(changed)
                directory = Path(place) / str(pair)
                directory.mkdir()
                for name, data in files.items():
                    (directory / name).write_bytes(data)
                began = time.perf_counter()
                await server.load_adapter(f"own-{pair}", str(directory))
                theirs.append(time.perf_counter() - began)
                began = time.perf_counter()
                await engine.load(PolicyVersion(PolicyName("ann"), pair), files)
                ours.append(time.perf_counter() - began)
                await server.unload_adapter(f"own-{pair}")
                await engine.unload(PolicyVersion(PolicyName("ann"), pair))
        return sum(map(len, files.values())), theirs, ours


def main() -> None:
    size, theirs, ours = asyncio.run(measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30))
    print("| adapter | SGLang's own load, median | ours, median | more | worst pair |")
    print("|---|---|---|---|---|")
    own, all_of_it = statistics.median(theirs), statistics.median(ours)
    more = [mine - its for mine, its in zip(ours, theirs, strict=True)]
    print(
        f"| {size / 1e6:.1f} MB | {own * 1e3:.1f} ms | {all_of_it * 1e3:.1f} ms | {statistics.median(more) * 1e3:.1f} ms | "
        f"{max(more) * 1e3:.1f} ms |"
    )


if __name__ == "__main__":
    main()
