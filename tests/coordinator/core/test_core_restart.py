"""A restarted coordinator: it goes on where it was, with whoever says Hello again and what they say they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_values import (
    END,
    ROLLOUT,
    RUN,
    START,
    UPDATE,
    agent,
    answer,
    arrival,
    blob,
    canonical,
    host_hello,
    request,
    run_spec,
    server_hello,
    turn,
    version,
)

from coordinator.core.coordinator import REJOIN, Coordinator
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, OptimStep, Published
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import Held, Hello
from tinker.protocol.to_host import Opened, Play, RunStopped, TurnClosed
from tinker.protocol.to_taskserver import Generate, Load, Release, Work
from tinker.protocol.values import (
    BASE,
    AdamSpec,
    AgentName,
    Ended,
    EpisodeId,
    LoraSpec,
    OpId,
    PeerName,
    PolicyName,
    RunId,
    WorkerName,
)
from tinker.runtime.plain import from_text, to_text

HOST, SERVER = PeerName("host"), PeerName("server")
R0, U1 = WorkerName("server/r0"), WorkerName("server/u1")
HELD = Held(RUN, R0, version("a", 0), "a0")


def playing() -> Coordinator:
    """A run of agent a in the rollout of round 1, two episodes, one of them with an open turn; one rollout and one update worker."""
    core = Coordinator(PeerName("coordinator"))
    core.join(server_hello("server", "ru"), 0.0)
    core.join(host_hello(), 0.0)
    core.step(HOST, said.Submit(run_spec(agent("a"))), 0.0)
    core.step(HOST, operate("attach", Attach(LoraSpec())), 0.0)
    core.step(SERVER, said.WorkerDone(RUN, OpId("attach"), U1, Published(version("a", 0), blob("a0"))), 0.0)
    core.step(SERVER, said.Loaded(RUN, R0, version("a", 0), "a0"), 0.0)
    core.step(HOST, arrival("a", 1, ROLLOUT, START), 0.0)
    core.step(HOST, turn(0, request("x", version("a", 0))), 0.0)
    return core


def operate(op: str, operation: object) -> said.Operate:
    return said.Operate(RUN, OpId(op), AgentName("a"), PolicyName("policy of a"), operation)  # type: ignore[arg-type]


def restarted(core: Coordinator, now: float = 1.0) -> Coordinator:
    """What a new process makes of the state."""
    again = from_text(to_text(core, Coordinator), Coordinator)
    again.turns.counts = again.counts
    assert canonical(again) == canonical(core)
    assert again.restart(core.epoch + 1, now) == []
    assert again.violations() == []
    return again


def back(core: Coordinator, hello: Hello, now: float = 2.0) -> list[object]:
    sends = core.join(replace(hello, incarnation=hello.incarnation + 1), now)
    assert core.violations() == []
    return [message for _, message in sends]


def test_the_epoch_must_rise() -> None:
    with pytest.raises(ValueError, match="epoch 1 does not rise"):
        playing().restart(1, 0.0)


def test_nobody_is_a_member_until_it_says_hello_again() -> None:
    core = restarted(playing())
    ((_, refused),) = core.step(HOST, said.Heartbeat(), 1.0)
    assert isinstance(refused, Refused) and refused.stranger
    assert back(core, host_hello()) == [Welcome(PeerName("coordinator"), 2, core.lease)]
    assert core.step(HOST, said.Heartbeat(), 2.0) == []


def test_a_run_goes_on_in_its_phase_with_what_its_workers_still_hold() -> None:
    core = restarted(playing())
    back(core, host_hello())
    assert [type(each) for each in back(core, replace(server_hello("server", "ru"), holding=(HELD,)))] == [Welcome]
    opened = turn(0, request("x", version("a", 0)))
    ((_, asked),) = core.step(HOST, opened, 3.0)  # the open turn is opened again
    assert isinstance(asked, Generate)
    ((_, closed),) = core.step(SERVER, answer(asked), 3.0)
    assert isinstance(closed, TurnClosed)
    for index in range(2):
        core.step(HOST, said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, index), Ended.FINISHED), 4.0)
    assert core.runs[RUN].rounds.at == (1, UPDATE, START)


def test_what_a_worker_no_longer_holds_it_loads_before_it_serves() -> None:
    core = restarted(playing())
    back(core, host_hello())
    for holding in ((), (replace(HELD, digest="other weights"),)):
        sends = back(core, replace(server_hello("server", "ru"), holding=holding, incarnation=len(holding)))
        assert [each.version for each in sends if isinstance(each, Load)] == [version("a", 0)]
    assert core.step(HOST, turn(0, request("x", version("a", 0))), 3.0) == []
    sends = core.step(SERVER, said.Loaded(RUN, R0, version("a", 0), "a0"), 3.0)
    assert [type(each) for _, each in sends] == [Generate]


def test_the_base_model_too_is_served_only_by_who_is_back() -> None:
    core = restarted(playing())
    back(core, host_hello())
    assert core.step(HOST, turn(0, request("x", BASE)), 3.0) == []
    assert [type(each) for each in back(core, server_hello("server", "ru"))] == [Welcome, Load, Generate]


def test_a_barrier_waits_for_a_worker_that_is_not_back_yet() -> None:
    core = playing()
    for index in range(2):
        core.step(HOST, said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, index), Ended.FINISHED), 1.0)
    core = restarted(core)
    back(core, host_hello())
    assert core.step(HOST, arrival("a", 1, UPDATE, START), 3.0) == []
    assert Opened in [type(each) for each in back(core, replace(server_hello("server", "ru"), holding=(HELD,)))]


def test_pending_operations_are_asked_again() -> None:
    core = playing()
    for index in range(2):
        core.step(HOST, said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, index), Ended.FINISHED), 1.0)
    core.step(HOST, arrival("a", 1, UPDATE, START), 1.0)
    ((_, work),) = core.step(HOST, operate("step", OptimStep(AdamSpec(1.0))), 1.0)
    core = restarted(core)
    back(core, host_hello())
    sends = back(core, replace(server_hello("server", "ru"), holding=(HELD,)))
    assert [each for each in sends if isinstance(each, Work)] == [work]


def test_episodes_stay_accounted_for_and_the_rest_is_handed_out_to_who_asks() -> None:
    core = playing()
    first = said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, 0), Ended.FINISHED)
    core.step(HOST, first, 1.0)
    core = restarted(core)
    back(core, host_hello())
    assert core.step(HOST, first, 3.0) == []
    assert core.runs[RUN].rounds.ended == {Ended.FINISHED: 1}
    sends = core.step(HOST, arrival("a", 1, ROLLOUT, START), 3.0)
    assert [type(each) for _, each in sends] == [Opened, Play]


def test_who_does_not_come_back_in_time_is_lost() -> None:
    core = restarted(playing())
    back(core, host_hello(), now=REJOIN)
    assert RunStopped not in [type(each) for _, each in core.tick(REJOIN + 0.9)]
    sends = core.tick(REJOIN + 1.1)
    assert [type(each) for _, each in sends] == [RunStopped]
    assert core.violations() == [] and not core.runs


def test_another_process_of_the_same_name_is_not_who_is_waited_for() -> None:
    core = restarted(playing())
    back(core, host_hello())
    sends = back(core, replace(server_hello("server", "ru"), pid=77))
    assert [type(each) for each in sends] == [RunStopped, Welcome]
    core = restarted(playing())
    back(core, replace(host_hello(), pid=77))
    assert not core.runs


def test_a_worker_that_died_meanwhile_is_lost() -> None:
    core = restarted(playing())
    back(core, host_hello())
    sends = back(core, server_hello("server", "r"))
    assert [type(each) for each in sends if isinstance(each, RunStopped)] == [RunStopped]


def test_what_is_held_for_runs_that_are_over_is_released() -> None:
    core = restarted(playing())
    sends = back(core, replace(server_hello("server", "ru"), holding=(HELD, replace(HELD, run=RunId("old")))))
    assert [each for each in sends if isinstance(each, Release)] == [Release(RunId("old"))]


def test_a_second_restart_waits_for_everybody_again() -> None:
    core = restarted(restarted(playing()), now=30.0)
    assert core.epoch == 3
    assert {each.until for each in core.roster.away.values()} == {30.0 + REJOIN}


def test_a_clock_that_began_anew_makes_no_wait_negative() -> None:
    core = Coordinator(PeerName("coordinator"))
    core.join(server_hello("server", "ru"), 500.0)
    core.join(host_hello(), 500.0)
    core.step(HOST, said.Submit(run_spec(agent("a"), agent("b"))), 500.0)
    for who in "ab":
        op = said.Operate(RUN, OpId(who), AgentName(who), PolicyName(f"policy of {who}"), Attach(LoraSpec()))
        core.step(HOST, op, 500.0)
        core.step(SERVER, said.WorkerDone(RUN, OpId(who), U1, Published(version(who, 0), blob(who))), 500.0)
        core.step(SERVER, said.Loaded(RUN, R0, version(who, 0), who), 500.0)
    core.step(HOST, arrival("a", 1, ROLLOUT, START), 500.0)
    core = restarted(core, now=3.0)
    back(core, host_hello())
    back(
        core,
        replace(
            server_hello("server", "ru"), holding=tuple(replace(HELD, version=version(w, 0), digest=w) for w in "ab")
        ),
    )
    sends = core.step(HOST, arrival("b", 1, ROLLOUT, START), 4.0)
    (opened,) = [each for _, each in sends if isinstance(each, Opened)]
    assert [wait.seconds for wait in opened.waits] == [1.0, 0.0]


def test_a_repeated_hello_is_welcomed_again_and_an_older_one_is_ignored() -> None:
    core = playing()
    before = canonical((core.runs, core.turns.tables))
    assert core.step(HOST, host_hello(), 1.0) == [(HOST, Welcome(PeerName("coordinator"), 1, core.lease))]
    core.step(HOST, replace(host_hello(), incarnation=2), 1.0)
    assert core.roster.peers[HOST].hello.incarnation == 2
    assert core.step(HOST, host_hello(), 1.0) == []
    assert canonical((core.runs, core.turns.tables)) == before


def test_who_missed_that_its_run_was_stopped_is_told_again() -> None:
    core = playing()
    stopped = [each for _, each in core.lose(SERVER, "gone", 1.0) if isinstance(each, RunStopped)]
    assert [each for _, each in core.step(HOST, arrival("a", 1, UPDATE, END), 2.0)] == stopped
    assert [each for _, each in core.step(HOST, turn(1, request("x", version("a", 0))), 2.0)] == stopped
