"""What the coordinator's log says about messages: one event for each that an operator would want to read, with run, round and member.

Chatter (heartbeats, requests, answers, arrivals) has no event. Prompts, answers and everything else that a scenario says never appear.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import (
    Bye,
    EndRun,
    GenerateFailed,
    LoadFailed,
    ToCoordinator,
    WorkerLost,
)
from tinker.protocol.to_host import (
    Admitted,
    Enlisted,
    Missing,
    Opened,
    OperationFailed,
    Queued,
    RunStopped,
    TurnRefused,
)
from tinker.protocol.values import PeerName, TurnId

HEARD = frozenset({Bye, EndRun, GenerateFailed, LoadFailed, WorkerLost})
TOLD = frozenset({Admitted, Enlisted, Missing, Opened, OperationFailed, Queued, RunStopped})


class Event(NamedTuple):
    """One line of the log."""

    level: Literal["info", "warning"]
    name: str
    fields: dict[str, object]


def heard(member: PeerName, message: ToCoordinator) -> Event | None:
    """The event of a message that a member sent, if it has one."""
    if type(message) not in HEARD:
        return None
    match message:
        case Bye():
            return Event("info", "left", {"member": member, "reason": message.reason})
        case EndRun():
            return Event("info", "run ended", {"run": message.run, "member": member, "reason": message.reason})
        case GenerateFailed():
            fields = {**_turn(message.turn), "member": member, "worker": message.worker, "reason": message.reason}
            return Event("warning", "request failed", fields)
        case LoadFailed():
            fields = {"run": message.run, "member": member, "worker": message.worker, "version": str(message.version)}
            return Event("warning", "load failed", {**fields, "reason": message.reason})
        case WorkerLost():
            lost = {"member": member, "worker": message.worker, "reason": message.reason}
            return Event("warning", "worker lost", {**lost})
        case _:
            return None


def told(member: PeerName, message: object) -> Event | None:
    """The event of a message that the coordinator sends to a member, if it has one (refusals: `refused`)."""
    if type(message) not in TOLD:
        return None
    match message:
        case Opened():
            last = message.members[-1] if len(message.members) > 1 else ""
            waited = (
                {"waited": round(message.waited[0], 3), "for": last} if message.waited else {}
            )  # the first waited longest
            dropped = {"dropped": ", ".join(message.dropped)} if message.dropped else {}
            return Event("warning" if dropped else "info", "barrier opened", {**_barrier(message), **waited, **dropped})
        case Missing():
            members = {"missing": ", ".join(message.missing), "arrived": ", ".join(message.arrived)}
            return Event("info", "waiting", {**_barrier(message), **members})
        case Admitted():
            return Event("info", "run admitted", {"run": message.run, "member": member, "model": message.model.name})
        case Enlisted():
            return Event("info", "host enlisted", {"run": message.run, "member": member, "learner": message.learner})
        case Queued():
            return Event("info", "run queued", {"run": message.run, "member": member, "reason": message.reason})
        case RunStopped() if message.finished:
            return Event("info", "run over", {"run": message.run, "member": member})
        case RunStopped():
            return Event("warning", "run stopped", {"run": message.run, "member": member, "reason": message.reason})
        case OperationFailed():
            operation = {"run": message.run, "member": member, "op": message.op, "reason": message.reason}
            return Event("warning", "operation failed", {**operation})
        case _:
            return None


def refused(member: PeerName, message: ToCoordinator, answer: Refused | TurnRefused) -> Event:
    """The event of a message that the core refused."""
    fields: dict[str, object] = {"what": type(message).__name__, "member": member, "reason": answer.reason}
    run, turn = getattr(message, "run", None), getattr(message, "turn", None)
    if turn is not None:
        fields = {**_turn(turn), **fields}
    elif run is not None:
        fields = {"run": run, **({"round": number} if (number := getattr(message, "round", None)) else {}), **fields}
    return Event("warning", "refused", fields)


def _barrier(message: Opened | Missing) -> dict[str, object]:
    return {
        "run": message.run,
        "round": message.round,
        "phase": str(message.phase),
        "edge": str(message.edge),
    }


def _turn(turn: TurnId) -> dict[str, object]:
    return {"run": turn.run, "round": turn.episode.round, "episode": str(turn.episode), "turn": turn.number}
