"""A member whose connection was closed: unreachable, not gone, until its lease ends or another process takes its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_values import (
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

from coordinator.core.coordinator import Coordinator, MemberRefused
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, Published
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import Held
from tinker.protocol.to_host import RunStopped, TurnClosed
from tinker.protocol.to_taskserver import Generate, Load, Release, Unload, Work
from tinker.protocol.values import BASE, AgentName, LoraSpec, OpId, PeerName, PolicyName, RunId, WorkerName

HOST, ONE, TWO = PeerName("host"), PeerName("one"), PeerName("two")
A0 = version("a", 0)
HELD = {name: Held(RUN, WorkerName(f"{name}/r0"), A0, "a0") for name in (ONE, TWO)}


def attach() -> said.Operate:
    return said.Operate(RUN, OpId("attach"), AgentName("a"), PolicyName("policy of a"), Attach(LoraSpec()))


def playing(*, attached: bool = True) -> Coordinator:
    """Agent a in the rollout of round 1; two task servers, the first one updates, both serve."""
    core = Coordinator(PeerName("coordinator"))
    core.join(server_hello("one", "ru"), 0.0)
    core.join(server_hello("two", "r"), 0.0)
    core.join(host_hello(), 0.0)
    core.step(HOST, said.Submit(run_spec(agent("a"))), 0.0)
    core.step(HOST, attach(), 0.0)
    if attached:
        core.step(ONE, said.WorkerDone(RUN, OpId("attach"), WorkerName("one/u1"), Published(A0, blob("a0"))), 0.0)
        for name in (ONE, TWO):
            core.step(name, said.Loaded(RUN, WorkerName(f"{name}/r0"), A0, "a0"), 0.0)
        core.step(HOST, arrival("a", 1, ROLLOUT, START), 0.0)
    return core


def back(core: Coordinator, name: PeerName, now: float) -> list[object]:
    """It says Hello again, with what it holds."""
    hello = core.roster.peers[name].hello
    held = (HELD[name],) if name in HELD else ()
    sends = core.join(replace(hello, incarnation=hello.incarnation + 1, holding=held), now)
    assert core.violations() == []
    return [message for _, message in sends]


def opened(core: Coordinator, index: int = 0, now: float = 1.0) -> Generate:
    ((_, asked),) = core.step(HOST, turn(0, request("x", A0), index=index), now)
    assert isinstance(asked, Generate)
    return asked


def test_what_it_was_asked_for_waits_and_is_asked_again_when_it_is_back() -> None:
    core = playing()
    asked = opened(core)
    owner = PeerName(asked.worker.partition("/")[0])
    assert core.part(owner, 2.0) == []
    assert core.tick(9.0) == []
    again = back(core, owner, 10.0)
    assert [replace(each, deadline=0.0) for each in again if isinstance(each, Generate)] == [
        replace(asked, deadline=0.0)
    ]
    assert Load not in [type(each) for each in again]
    ((_, closed),) = core.step(owner, answer(asked), 11.0)
    assert isinstance(closed, TurnClosed)


def test_an_operation_of_it_is_asked_again_when_it_is_back() -> None:
    core = playing(attached=False)
    core.part(ONE, 1.0)
    assert OpId("attach") in core.runs[RUN].pending
    assert [each.op for each in back(core, ONE, 2.0) if isinstance(each, Work)] == ["attach"]


def test_nothing_new_is_given_to_it() -> None:
    core = playing()
    core.part(ONE, 1.0)
    assert {opened(core, index).worker for index in range(2)} == {"two/r0"}


def test_what_nobody_else_serves_is_asked_when_it_is_back() -> None:
    core = playing()
    for name in (ONE, TWO):
        core.part(name, 1.0)
    assert core.step(HOST, turn(0, request("x", A0)), 2.0) == []
    assert [each.worker for each in back(core, TWO, 3.0) if isinstance(each, Generate)] == ["two/r0"]


def test_when_its_lease_ends_it_is_lost_and_its_requests_go_to_others() -> None:
    core = playing()
    assert [opened(core, index, now=15.0).worker for index in range(2)] == ["one/r0", "two/r0"]
    for name in (HOST, ONE):
        core.step(name, said.Heartbeat(), 15.0)
    core.part(TWO, 16.0)
    core.tick(29.9)
    assert TWO in core.roster.peers
    sends = core.tick(30.1)
    assert TWO not in core.roster.peers and core.violations() == []
    assert [(each.worker, each.turn.episode.index) for _, each in sends if isinstance(each, Generate)] == [
        ("one/r0", 1)
    ]


def test_a_run_outlives_its_host_by_a_lease_only() -> None:
    core = playing()
    core.part(HOST, 1.0)
    assert RUN in core.runs
    for name in (ONE, TWO):
        core.step(name, said.Heartbeat(), 20.0)
    core.tick(31.0)
    assert RUN not in core.runs


def test_a_host_that_is_back_goes_on_with_its_run() -> None:
    core = playing()
    core.part(HOST, 1.0)
    assert back(core, HOST, 2.0) == [Welcome(PeerName("coordinator"), 1, core.lease)]
    assert opened(core, now=3.0)


def test_it_is_a_stranger_until_it_says_hello() -> None:
    core = playing()
    core.part(HOST, 1.0)
    ((_, refused),) = core.step(HOST, said.Heartbeat(), 2.0)
    assert isinstance(refused, Refused) and refused.stranger
    assert core.counts["refused Heartbeat"] == 1


def test_a_hello_that_was_under_way_when_the_connection_closed_is_heard() -> None:
    core = playing()
    core.part(HOST, 1.0)
    assert core.join(host_hello(), 2.0)
    older = replace(host_hello(), incarnation=-1)
    core.part(HOST, 3.0)
    with pytest.raises(MemberRefused):
        core.join(older, 4.0)


def test_another_process_takes_its_name_and_it_is_lost() -> None:
    core = playing()
    new = replace(server_hello("one", "ru"), pid=77)
    with pytest.raises(MemberRefused):
        core.join(new, 1.0)
    core.part(ONE, 2.0)
    sends = core.join(new, 3.0)
    ((_, stopped),) = [each for each in sends if isinstance(each[1], RunStopped)]
    assert "process 2 is gone, 77 has taken its name" in stopped.reason
    assert core.roster.peers[ONE].hello.pid == 77 and core.violations() == []
    with pytest.raises(MemberRefused, match="already in use by process 77"):  # the first one was only cut off
        core.join(replace(server_hello("one", "ru"), incarnation=1), 4.0)


def test_a_connection_that_closes_twice_is_counted_once() -> None:
    core = playing()
    core.part(ONE, 1.0)
    core.part(ONE, 2.0)
    core.part(PeerName("nobody"), 2.0)
    assert core.counts["connections closed"] == 1
    assert core.roster.peers[ONE].closed == 1.0


def test_when_everybody_is_gone_at_once_the_coordinator_serves_whoever_comes() -> None:
    """Case 12."""
    core = playing()
    opened(core)
    for name in (HOST, ONE, TWO):
        core.part(name, 1.0)
    core.tick(40.0)
    assert not core.roster.peers and not core.runs and not core.turns.tables and core.violations() == []
    core.join(server_hello("new", "ru"), 41.0)
    core.join(host_hello("other"), 41.0)
    sends = core.step(PeerName("other"), said.Submit(run_spec(agent("a"), run="next")), 41.0)
    assert [type(each).__name__ for _, each in sends] == ["Admitted"]


def test_a_member_that_joins_and_leaves_at_once_leaves_nothing() -> None:
    """Case 19."""
    core = Coordinator(PeerName("coordinator"))
    core.join(host_hello(), 0.0)
    core.step(HOST, said.Submit(run_spec(agent("a"))), 0.0)
    core.step(HOST, said.Bye("changed my mind"), 0.0)
    assert not core.roster.peers and not core.queue and not core.runs
    core.join(server_hello("one", "ru"), 0.0)
    assert not core.runs and core.violations() == []


def test_what_is_held_in_vain_is_told_again_with_every_heartbeat() -> None:
    """A Release or an Unload was lost."""
    core = playing()
    old, gone = replace(HELD[TWO], version=version("a", 7)), replace(HELD[TWO], run=RunId("run that ended"))
    held = (HELD[TWO], old, replace(HELD[TWO], version=BASE), replace(old, worker=WorkerName("one/r0")), gone)
    sends = core.step(TWO, said.Heartbeat(held, (RUN, RunId("another"))), 5.0)
    assert sends == [
        (TWO, Release(RunId("another"))),
        (TWO, Release(RunId("run that ended"))),
        (TWO, Unload(RUN, WorkerName("two/r0"), version("a", 7))),
    ]
    assert core.step(TWO, said.Heartbeat((HELD[TWO],), (RUN,)), 6.0) == []
    assert core.step(HOST, said.Heartbeat(), 6.0) == []
