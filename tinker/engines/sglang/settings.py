"""How the SGLang engine is set up: which servers there are or how to start them, and how weights get to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit


class Transfer(StrEnum):
    """How weights get to a server."""

    AUTO = "auto"  # as files to a server on this machine, else over the wire
    FILES = "files"  # it reads our directory: both see the same file system
    TENSORS = "tensors"  # in the request

    def by_file(self, url: str) -> bool:
        """Whether the server at this address is given a path."""
        if self is Transfer.AUTO:
            return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        return self is Transfer.FILES


@dataclass(frozen=True, slots=True)
class Launch:
    """Servers of our own. `python`: an interpreter that has SGLang. `device`: "cpu" starts it by `cpu_server.py`, others by SGLang's own
    launcher. `ports`: one for each replica; (): free ones. `arguments`: for SGLang's command line, after ours. `ready`: seconds until it
    must serve. `restarts`: how often a server may die within an hour. `grace`: seconds to drain when told to stop."""

    python: str = ".venv-sglang/bin/python"
    replicas: int = 1
    device: str = "cpu"
    ports: tuple[int, ...] = ()
    adapters: int = 32
    batch_adapters: int = 8
    max_rank: int = 32
    threads: int = 1
    tokens: int = 32768
    arguments: tuple[str, ...] = ()
    ready: float = 300.0
    restarts: int = 3
    grace: float = 10.0


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What servers ask for before they listen: `--api-key` and `--admin-api-key` of SGLang ("": nothing)."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Servers:
    """All of it. Either `urls` of running servers or `launch`. `full_replicas`: servers given to each policy with full weights.

    `watch`: seconds between looks at an idle server; `misses`: how many may fail. `drain`: seconds that requests under way may take before
    a whole model is replaced. `flushes`: how often to ask for an empty cache, with longer and longer pauses from `pause` seconds on.
    """

    urls: tuple[str, ...] = ()
    launch: Launch | None = None
    transfer: Transfer = Transfer.AUTO
    full_replicas: int = 1
    keys: ServerKeys = ServerKeys()
    watch: float = 2.0
    misses: int = 3
    drain: float = 30.0
    flushes: int = 8
    pause: float = 0.05
    join: float = 120.0
    bucket: int = 1 << 28
