"""What we know of one server: whether it may be asked, what it holds, and who is waiting for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import anyio

from tinker.engines.sglang.api import Unavailable
from tinker.engines.sglang.server import Facts, Server
from tinker.protocol.values import BASE, PolicyName, PolicyVersion


class State(StrEnum):
    JOINING = "joining"  # it is started, or caught up with what the others hold
    SERVING = "serving"
    FENCED = "fenced"  # taken out of routing; it comes back when it holds everything
    GONE = "gone"  # for good: its restarts are spent


@dataclass(slots=True, eq=False)
class Replica:
    """`model_path`: of the base model, as the server finds it. `label`: what it must call its base weights in every answer; `base`: what
    they are. `owner`: the policy with full weights that it is for ("": the base model and its adapters). `held`: adapters that it
    acknowledged, by the name they have there; `leftover`: names that it would not unload."""

    number: int
    server: Server | None = None
    facts: Facts | None = None
    state: State = State.JOINING
    reason: str = "it is being started"
    label: str = ""
    model_path: str = ""
    base: PolicyVersion = BASE
    owner: PolicyName = PolicyName("")
    held: dict[PolicyVersion, str] = field(default_factory=dict)
    leftover: set[str] = field(default_factory=set)
    running: Counter[PolicyVersion] = field(default_factory=Counter)
    fenced: anyio.Event = field(default_factory=anyio.Event)
    _waiting: set[anyio.CancelScope] = field(default_factory=set)

    @property
    def in_flight(self) -> int:
        return self.running.total()

    @property
    def name(self) -> str:
        return f"replica {self.number} ({self.server.url if self.server else 'no server'})"

    def serves(self, version: PolicyVersion) -> bool:
        """Whether a request for exactly this version may go there."""
        return self.state is State.SERVING and (version == self.base or version in self.held)

    @property
    def address(self) -> Server:
        """The server. Only for replicas that have been started."""
        assert self.server is not None
        return self.server

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Wait for an answer from there, unless the server is lost meanwhile: Unavailable."""
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise Unavailable(f"{self.name} was lost: {self.reason}")

    def lost(self) -> None:
        """Nobody needs to wait for its answers any more."""
        for scope in self._waiting:
            scope.cancel()

    def fence(self, reason: str) -> bool:
        """Ask it nothing more. False if it was out already."""
        if self.state is not State.SERVING:
            return False
        self.state, self.reason = State.FENCED, reason
        self.fenced.set()
        return True
