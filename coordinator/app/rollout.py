"""`[rollout]`: what answers the agents, if not the engine that trains them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from tinker.engines.sglang import Servers

KEY, ADMIN_KEY = "OPENTINKER_SGLANG_KEY", "OPENTINKER_SGLANG_ADMIN_KEY"


class LaunchConfig(BaseModel):
    """Servers of our own; see `tinker.engines.sglang.settings.Launch`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str = ".venv-sglang/bin/python"
    replicas: Annotated[int, Field(ge=1)] = 1
    device: str = "cpu"
    ports: tuple[Annotated[int, Field(ge=1, lt=65536)], ...] = ()
    adapters: Annotated[int, Field(ge=2)] = 32
    batch_adapters: Annotated[int, Field(ge=2)] = 8
    max_rank: Annotated[int, Field(ge=1)] = 32
    threads: Annotated[int, Field(ge=1)] = 1
    tokens: Annotated[int, Field(ge=64)] = 32768
    arguments: tuple[str, ...] = ()
    ready: Annotated[float, Field(gt=0)] = 300.0
    restarts: Annotated[int, Field(ge=0)] = 3

    @model_validator(mode="after")
    def _a_port_each(self) -> LaunchConfig:
        if self.ports and len(self.ports) != self.replicas:
            raise ValueError(f"ports: {len(self.ports)} for {self.replicas} replicas; name one each, or none")
        return self


class RolloutConfig(BaseModel):
    """`engine` "": the run's own. `url`: SGLang servers that run already; none: some are launched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["", "sglang"] = ""
    url: tuple[str, ...] = ()
    transfer: Literal["auto", "files", "tensors"] = "auto"
    full_replicas: Annotated[int, Field(ge=1)] = 1
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _servers_that_can_be(self) -> RolloutConfig:
        for url in self.url:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"url: {url!r} is no address of a server; expected something like http://host:30000")
        if len(set(self.url)) < len(self.url):
            raise ValueError("url: an address is named twice; each server counts once")
        if self.url and self.launch != LaunchConfig():
            raise ValueError("url: and launch: name running servers, or how to launch some, not both")
        return self

    def servers(self, environment: Mapping[str, str] = os.environ) -> Servers:
        """The same, as the engine takes it; keys of running servers come from the environment."""
        from tinker.engines.sglang import Launch, ServerKeys, Servers, Transfer

        return Servers(
            self.url,
            None if self.url else Launch(**self.launch.model_dump()),
            Transfer(self.transfer),
            self.full_replicas,
            ServerKeys(environment.get(KEY, ""), environment.get(ADMIN_KEY, "")),
        )


def rollout_problems(rollout: RolloutConfig, engine: str, ranks: Mapping[str, int]) -> list[str]:
    """What stands in the way of it, here, beside this engine. `ranks`: of each adapter, by the place in the configuration."""
    launch = rollout.launch
    if not rollout.engine:
        return []
    problems = []
    if engine == "scripted":
        problems.append(
            "rollout.engine: the scripted engine trains no adapters that a server could load; use engine torch"
        )
    if rollout.url:
        return problems
    problems += [
        f"{place}: rank {rank}, but rollout.launch.max_rank is {launch.max_rank}: raise it"
        for place, rank in ranks.items()
        if rank > launch.max_rank
    ]
    if shutil.which(launch.python) is None:
        problems.append(
            f"rollout.launch.python: {launch.python} cannot be run from {Path.cwd()}; `make sglang` makes .venv-sglang, or name the "
            "interpreter of an environment that has SGLang"
        )
    return problems
