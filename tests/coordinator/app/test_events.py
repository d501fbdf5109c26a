"""Which messages the log tells of, and with what."""

from __future__ import annotations

import pytest

from coordinator.app import events
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import (
    Arrive,
    Bye,
    EndRun,
    GenerateFailed,
    Heartbeat,
    LoadFailed,
    OpenTurn,
    ToCoordinator,
    WorkerLost,
)
from tinker.protocol.to_host import Missing, Opened, OperationFailed, Queued, RunStopped, TurnRefused
from tinker.protocol.values import (
    AgentName,
    Edge,
    EpisodeId,
    OpId,
    PeerName,
    Phase,
    PolicyName,
    PolicyVersion,
    RunId,
    SeatName,
    TurnId,
    WorkerName,
)

RUN, HOST, WORKER = RunId("run"), PeerName("host"), WorkerName("server/r")
TURN = TurnId(RUN, EpisodeId(3, Phase.ROLLOUT, 5), 2)
AT = (RUN, 3, Phase.ROLLOUT, Edge.END)


@pytest.mark.parametrize(
    ("message", "name", "fields"),
    [
        (Bye("done"), "left", {"member": HOST}),
        (EndRun(RUN, "done"), "run ended", {"run": RUN, "member": HOST}),
        (GenerateFailed(TURN, SeatName("x"), WORKER, "no room"), "request failed", {"run": RUN, "round": 3}),
        (LoadFailed(RUN, WORKER, PolicyVersion(PolicyName("p"), 1), "gone"), "load failed", {"version": "p@1"}),
        (WorkerLost(WORKER, "it died"), "worker lost", {"worker": WORKER, "reason": "it died"}),
    ],
)
def test_what_members_say(message: ToCoordinator, name: str, fields: dict[str, object]) -> None:
    event = events.heard(HOST, message)
    assert event is not None
    assert event.name == name
    assert fields.items() <= event.fields.items()
    assert event.fields["member"] == HOST


@pytest.mark.parametrize(
    ("message", "name", "fields"),
    [
        (
            Opened(*AT, ("a", "b"), (2.5, 0.0), (), ()),
            "barrier opened",
            {"run": RUN, "round": 3, "phase": "rollout", "edge": "end", "waited": 2.5, "for": "b"},
        ),
        (Missing(*AT, ("a",), ("b", "c")), "waiting", {"run": RUN, "round": 3, "missing": "b, c", "arrived": "a"}),
        (Queued(RUN, "no server"), "run queued", {"run": RUN, "member": HOST, "reason": "no server"}),
        (RunStopped(RUN, "its worker died"), "run stopped", {"run": RUN, "member": HOST}),
        (OperationFailed(RUN, OpId("op1"), "not finite"), "operation failed", {"run": RUN, "op": "op1"}),
    ],
)
def test_what_members_are_told(message: object, name: str, fields: dict[str, object]) -> None:
    event = events.told(HOST, message)
    assert event is not None
    assert event.name == name
    assert fields.items() <= event.fields.items()


def test_chatter_has_no_event() -> None:
    assert events.heard(HOST, Heartbeat()) is None
    assert events.told(HOST, Welcome(PeerName("coordinator"), 1, 15.0)) is None


def test_a_refusal_names_run_round_and_member() -> None:
    arrive = Arrive(RUN, 4, Phase.UPDATE, Edge.START, AgentName("a"), 1)
    fields = events.refused(HOST, arrive, Refused("Arrive", "too early")).fields
    assert fields == {"run": RUN, "round": 4, "what": "Arrive", "member": HOST, "reason": "too early"}
    turn = events.refused(HOST, OpenTurn(TURN, (), 1.0), TurnRefused(TURN, "draining")).fields
    assert (turn["run"], turn["round"], turn["what"]) == (RUN, 3, "OpenTurn")
