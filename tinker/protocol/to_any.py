"""Messages every peer may receive from the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from tinker.protocol.values import PeerName


@dataclass(frozen=True, slots=True)
class Welcome:
    """You are a member. `epoch` grows when the coordinator restarts; `lease`: be heard at least this often (seconds)."""

    coordinator: PeerName
    epoch: int
    lease: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Your message (or connection) was refused. Nothing has changed. `stranger`: because you are no member (any more); say Hello."""

    what: str
    reason: str
    stranger: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    """The coordinator is stopping: open no new turns."""

    reason: str


ToAny = Welcome | Refused | Draining
