"""Who waits for which answer, and what they are told when there will be none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from tinker.protocol.operations import Lost


class ClientError(Exception):
    """The coordinator could not be asked, or refused."""


class CoordinatorLost(ClientError):
    """The coordinator has not been heard for longer than our patience, or the connection was closed."""


class RunOver(ClientError):
    """The run is over; the message says why. `finished`: its learner host has ended it."""

    def __init__(self, reason: str, finished: bool = False) -> None:
        super().__init__(reason)
        self.finished = finished


class TurnError(ClientError):
    """The gate refused the turn. `fenced`: its episode is another host's to play."""

    def __init__(self, reason: str, fenced: bool = False) -> None:
        super().__init__(reason)
        self.fenced = fenced


class OperationError(ClientError):
    """A worker could not do the operation, or the gate refused it. `lost`: what the worker lacked, if it was that."""

    def __init__(self, reason: str, lost: Lost = Lost.NOTHING) -> None:
        super().__init__(reason)
        self.lost = lost


@dataclass(slots=True)
class _Waited:
    """What some wait for, and how many they are. One that is cancelled leaves the others waiting."""

    event: anyio.Event = field(default_factory=anyio.Event)
    box: list[Any] = field(default_factory=list)
    waiters: int = 0

    def answer(self, value: Any) -> None:
        """The first answer counts."""
        if not self.box:
            self.box.append(value)
        self.event.set()


class Waiters:
    """Futures by key. What comes for a key nobody waits for is kept if somebody may still ask for it, else counted as late."""

    def __init__(self) -> None:
        self.waiting: dict[object, _Waited] = {}
        self.early: dict[object, Any] = {}
        self.broken: ClientError | None = None

    async def get(self, key: object) -> Any:
        if key in self.early:
            return _or_raise(self.early.pop(key))
        if self.broken is not None:
            raise self.broken
        waited = self.waiting.setdefault(key, _Waited())
        waited.waiters += 1
        try:
            await waited.event.wait()
        finally:
            waited.waiters -= 1
            if not waited.waiters and self.waiting.get(key) is waited:  # else somebody else still waits for it
                del self.waiting[key]
        return _or_raise(waited.box[0])

    def put(self, key: object, value: Any, *, keep: bool = False) -> None:
        if key in self.waiting:
            self.waiting[key].answer(value)
        elif keep:
            self.early[key] = value

    def break_all(self, error: ClientError) -> None:
        self.broken = self.broken or error
        for waited in self.waiting.values():
            waited.answer(self.broken)


def _or_raise(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value
