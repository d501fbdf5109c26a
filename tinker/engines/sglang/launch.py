"""SGLang servers of our own: started under a warden with an interpreter of their own, on loopback, and stopped with us whatever happens."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import Process as SystemProcess

from tinker.engines.engine import EngineError
from tinker.engines.sglang.api import Unavailable
from tinker.engines.sglang.joining import STARTED
from tinker.engines.sglang.settings import Launch

HERE = Path(__file__).parent
LAST_WORDS = 12  # lines of its log that are told
NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_RETURN_ORIGINAL_LOGPROB")


@dataclass(slots=True, eq=False)
class LaunchedServer:
    """One server process (a `keeper.Process`). `log`: where its output goes, appended."""

    launch: Launch
    model: Path
    number: int
    log: Path
    url: str = ""
    _process: SystemProcess | None = None
    _ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of its warden."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Unavailable if the interpreter cannot be run. It is not ready yet."""
        await self._let_go()
        port = self.launch.ports[self.number] if self.launch.ports else free_port()
        self.url = f"http://127.0.0.1:{port}"
        warden = [sys.executable, "-I", str(HERE / "warden.py"), str(self.launch.grace)]
        with self.log.open("ab") as file:
            self._process = await anyio.open_process(
                [*warden, *command(self.launch, self.model, port, self.number)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment(self.launch, os.environ),
                start_new_session=True,
            )

    async def exited(self) -> None:
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """It drains for the grace time. When this returns nothing of it is left."""
        with anyio.CancelScope(shield=True):
            if self._process is not None and self._process.returncode is None:
                assert self._process.stdin is not None
                await self._process.stdin.aclose()
                with anyio.move_on_after(self.launch.grace + 10.0):
                    await self._process.wait()
                if self._process.returncode is None:
                    self._process.kill()
                    await self._process.wait()
            await self._let_go()

    def story(self) -> str:
        code = self._process.returncode if self._process is not None else None
        how = f"with exit code {code}"
        if code is not None and (code < 0 or code > 128):
            number = -code if code < 0 else code - 128
            how = f"by signal {number} ({signal.Signals(number).name})" if number in set(signal.Signals) else how
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS:] if self.log.exists() else []
        return f"SGLang server {self.number} ended {how}; the end of its log ({self.log}):\n  " + "\n  ".join(lines)

    async def _let_go(self) -> None:
        if self._process is not None and self._process.returncode is not None:
            await self._process.aclose()
            self._process = None


def command(launch: Launch, model: Path, port: int, number: int) -> list[str]:
    """The server's command line. `{replica}` in an argument is its number."""
    start = [str(HERE / "cpu_server.py")] if launch.device == "cpu" else ["-m", "sglang.launch_server"]
    options = {
        "model-path": str(model),
        "served-model-name": model.name,
        "host": "127.0.0.1",
        "port": str(port),
        "device": launch.device,
        "weight-version": f"{STARTED}{secrets.token_hex(4)}",
        "max-loras-per-batch": str(launch.batch_adapters),
        "max-loaded-loras": str(launch.adapters),
        "max-lora-rank": str(launch.max_rank),
        "lora-target-modules": "all",
    }
    flags = ["--enable-lora"]
    if launch.device == "cpu":
        options |= {"dtype": "float32", "lora-backend": "torch_native", "max-total-tokens": str(launch.tokens)}
        flags.append("--sleep-on-idle")
    plain = [part for name, value in options.items() for part in (f"--{name}", value)]
    own = [argument.replace("{replica}", str(number)) for argument in launch.arguments]
    return [launch.python, "-P", *start, *plain, *flags, *own]


def environment(launch: Launch, ours: Mapping[str, str]) -> dict[str, str]:
    """Ours, less what would make its interpreter find our packages, or its logprobs mean something else."""
    kept = {name: value for name, value in ours.items() if name not in NOT_THEIRS and "KEY" not in name}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(launch.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }


def check_launch(launch: Launch) -> None:
    """EngineError before anything is started if it cannot be."""
    if launch.ports and len(launch.ports) != launch.replicas:
        raise EngineError(f"rollout.launch has {launch.replicas} replicas and {len(launch.ports)} ports: name one each")
    if shutil.which(launch.python) is None:
        raise EngineError(
            f"rollout.launch.python is {launch.python!r}, which cannot be run: `make sglang` makes .venv-sglang/bin/python, or name the "
            "interpreter of an environment that has sglang"
        )


def free_port() -> int:
    """One that nobody listens on now; if somebody else is quicker the server ends at once, and is started on another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


__all__ = ["LaunchedServer", "Unavailable", "check_launch", "command", "environment", "free_port"]
