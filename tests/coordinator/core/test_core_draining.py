"""Draining: nothing new begins, what has begun may end, everybody is told."""

from __future__ import annotations

from dataclasses import replace

from core_values import (
    END,
    ROLLOUT,
    RUN,
    START,
    agent,
    answer,
    arrival,
    blob,
    host_hello,
    request,
    run_spec,
    server_hello,
    turn,
    version,
)

from coordinator.core.coordinator import Coordinator
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, Published
from tinker.protocol.to_any import Draining, Refused
from tinker.protocol.to_host import Opened, RunStopped, TurnClosed, TurnRefused
from tinker.protocol.to_taskserver import Generate, Release
from tinker.protocol.values import AgentName, Ended, EpisodeId, LoraSpec, OpId, PeerName, PolicyName, RunId, WorkerName

HOST, SERVER, OTHER = PeerName("host"), PeerName("server"), PeerName("other")
WHY = "the coordinator is stopping"


def playing() -> Coordinator:
    """A run of one agent in the rollout of round 1, with two episodes, on one rollout worker."""
    core = Coordinator(PeerName("coordinator"))
    core.join(server_hello("server", "ru"), 0.0)
    core.join(host_hello(), 0.0)
    core.step(HOST, said.Submit(run_spec(agent("a"))), 0.0)
    policy = PolicyName("policy of a")
    core.step(HOST, said.Operate(RUN, OpId("op"), AgentName("a"), policy, Attach(LoraSpec())), 0.0)
    published = Published(version("a", 0), blob("d0"))
    core.step(SERVER, said.WorkerDone(RUN, OpId("op"), WorkerName("server/u1"), published), 0.0)
    core.step(SERVER, said.Loaded(RUN, WorkerName("server/r0"), version("a", 0), "d0"), 0.0)
    core.step(HOST, arrival("a", 1, ROLLOUT, START), 0.0)
    assert core.runs[RUN].rounds.unaccounted
    return core


def messages(sends: list[tuple[PeerName, object]], kind: type) -> list[tuple[PeerName, object]]:
    return [(peer, message) for peer, message in sends if isinstance(message, kind)]


def test_every_member_is_told_once() -> None:
    core = playing()
    assert core.drain(WHY) == [(SERVER, Draining(WHY)), (HOST, Draining(WHY))]
    assert core.violations() == []


def test_no_turn_opens_any_more_but_an_open_one_closes() -> None:
    core = playing()
    [(_, asked)] = messages(core.step(HOST, turn(1, request("x", version("a", 0))), 1.0), Generate)
    assert isinstance(asked, Generate)
    core.drain(WHY)
    late = turn(1, request("x", version("a", 0)), index=1)
    assert core.step(HOST, late, 1.0) == [(HOST, TurnRefused(late.turn, WHY))]
    assert messages(core.step(SERVER, answer(asked), 2.0), TurnClosed)
    assert core.counts["refused OpenTurn"] == 1
    assert core.violations() == []


def test_a_turn_that_is_asked_for_again_is_still_answered() -> None:
    core = playing()
    opened = turn(1, request("x", version("a", 0)))
    [(_, asked)] = messages(core.step(HOST, opened, 1.0), Generate)
    assert isinstance(asked, Generate)
    core.drain(WHY)
    assert core.step(HOST, opened, 2.0) == [(SERVER, replace(asked, deadline=19.0))]
    [closed] = messages(core.step(SERVER, answer(asked), 3.0), TurnClosed)
    assert core.step(HOST, opened, 4.0) == [closed]


def test_a_phase_that_has_begun_can_end() -> None:
    core = playing()
    core.drain(WHY)
    sends = []
    for index in (0, 1):
        ended = said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, index), Ended.DROPPED, WHY)
        sends += core.step(HOST, ended, 1.0)
    [(_, opened)] = messages(sends, Opened)
    assert isinstance(opened, Opened)
    assert (opened.phase, opened.edge) == (ROLLOUT, END)


def test_no_run_is_admitted_any_more() -> None:
    core = playing()
    core.drain(WHY)
    core.join(host_hello("other"), 1.0)
    submit = said.Submit(run_spec(run="another"))
    assert core.step(OTHER, submit, 1.0) == [(OTHER, Refused("Submit", f"no run is admitted any more: {WHY}"))]
    assert core.queue == {}
    assert core.counts["refused Submit"] == 1


def test_a_run_that_waits_in_the_queue_is_over() -> None:
    core = Coordinator(PeerName("coordinator"))
    core.join(host_hello(), 0.0)
    core.step(HOST, said.Submit(run_spec()), 0.0)
    assert core.drain(WHY) == [(HOST, Draining(WHY)), (HOST, RunStopped(RUN, WHY))]
    assert core.join(server_hello(), 1.0)[1:] == []
    assert core.runs == {}


def test_runs_that_are_left_at_the_end_are_stopped_and_freed() -> None:
    core = playing()
    core.drain(WHY)
    assert core.close() == [(SERVER, Release(RunId(RUN))), (HOST, RunStopped(RUN, WHY))]
    assert core.runs == {}
    assert core.violations() == []
