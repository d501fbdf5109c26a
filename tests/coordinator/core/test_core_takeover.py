"""Workers that die or hang while they update: others take over what they were doing, or the run waits for one as long as it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_values import END, ROLLOUT, RUN, START, UPDATE, agent, arrival, blob, run_spec, server_hello, turn, version
from test_core_coordinator import F3, HOST, R0, R1, SERVER, U2, Desk, admitted, done, kinds, loaded, of, seat

from coordinator.core.coordinator import NOTICE
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import (
    Attach,
    ForwardBackward,
    LoadState,
    Measured,
    OptimStep,
    Publish,
    Published,
    Saved,
    SaveState,
    Score,
)
from tinker.protocol.to_host import Admitted, Missing, Opened, OperationDone, OperationFailed, RunStopped, TurnClosed
from tinker.protocol.to_taskserver import Generate, Load, Work
from tinker.protocol.values import BASE, AdamSpec, Ended, EpisodeId, LoraSpec, LossSpec, PeerName, WorkerName

OTHER, U0 = PeerName("other"), WorkerName("other/u0")
GRADIENT = ForwardBackward(blob("rows"), LossSpec("importance_sampling"))
STEP = OptimStep(AdamSpec(1e-3))


def updating(**changes: object) -> Desk:
    """Agent a, alone, may update in round 1."""
    desk = admitted(run_spec(agent("a"), worker_deadline=60.0, **changes))
    desk.publish("attach", "a", Attach(LoraSpec()), 0)
    desk.says(HOST, arrival("a", 1, ROLLOUT, START))
    for index in range(2):
        desk.says(HOST, said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, index), Ended.FINISHED))
    assert kinds(desk.says(HOST, arrival("a", 1, UPDATE, START))) == ["Opened", "MayUpdate"]
    return desk


def given(sends: list[object]) -> list[tuple[str, str]]:
    """Operations that workers are asked for."""
    return [(work.op, work.worker) for work in of(Work, sends)]


class TestAnotherWorker:
    @pytest.mark.parametrize("how", ["the worker", "its server"])
    def test_it_is_given_at_once_what_a_lost_worker_was_doing(self, how: str) -> None:
        desk = updating()
        desk.join(server_hello("other", "u"))
        assert given(desk.operate("gradient", "a", GRADIENT)) == [("gradient", U2)]
        desk.join(server_hello("third", "r"))
        desk.says(PeerName("third"), loaded(WorkerName("third/r0"), "a", 0))
        lost = (
            desk.says(SERVER, said.WorkerLost(U2, "it died"))
            if how == "the worker"
            else desk.keep(desk.core.lose(SERVER, "its connection was closed", desk.now))
        )
        assert given(lost) == [("gradient", U0)]
        (told,) = of(OperationDone, desk.says(OTHER, done("gradient", Measured(()), U0)))
        assert told.op == "gradient"
        assert given(desk.operate("step", "a", STEP)) == [("step", U0)]

    def test_the_host_is_told_where_its_batches_must_go_now(self) -> None:
        desk = updating()
        desk.join(replace(server_hello("other", "u"), machine="there", data="tcp://there"))
        (told,) = of(Admitted, desk.says(SERVER, said.WorkerLost(U2, "it died")))
        assert (told.machine, told.data) == ("there", "tcp://there")

    def test_what_the_lost_one_says_later_is_not_heard(self) -> None:
        desk = updating()
        desk.join(server_hello("other", "u"))
        desk.operate("step", "a", STEP)
        desk.says(SERVER, said.WorkerLost(U2, "it died"))
        assert desk.says(SERVER, done("step", Measured(()))) == []
        assert "step" in desk.core.runs[RUN].pending

    def test_of_another_model_it_takes_nothing(self) -> None:
        desk = updating()
        desk.join(server_hello("other", "u", model="m2"))
        desk.operate("gradient", "a", GRADIENT)
        assert given(desk.says(SERVER, said.WorkerLost(U2, "it died"))) == []
        assert desk.core.runs[RUN].lacks == "update worker"

    def test_a_score_goes_to_another_forward_worker(self) -> None:
        desk = updating()
        desk.join(server_hello("other", "f"))
        desk.operate("score", "a", Score(blob("rows"), BASE))
        assert given(desk.says(SERVER, said.WorkerLost(F3, "it died"))) == [("score", "other/f0")]


class TestNobodyLeft:
    def test_a_run_waits_says_so_and_goes_on_with_whoever_joins(self) -> None:
        desk = updating()
        desk.operate("gradient", "a", GRADIENT)
        assert kinds(desk.says(SERVER, said.WorkerLost(U2, "it was killed"))) == []
        assert desk.operate("gradient", "a", GRADIENT) == []  # asked again: still nobody
        desk.now += NOTICE
        (missing,) = of(Missing, desk.keep(desk.core.tick(desk.now)))
        assert f"any update worker (its last update worker {U2} was lost: it was killed)" in missing.missing
        assert given(desk.join(server_hello("other", "u"))) == [("gradient", U0)]
        desk.now += 1000.0
        desk.says(OTHER, said.Heartbeat())
        desk.says(HOST, said.Heartbeat())
        assert of(RunStopped, desk.keep(desk.core.tick(desk.now))) == []

    def test_an_operation_that_is_asked_for_meanwhile_waits_too(self) -> None:
        desk = updating()
        desk.says(SERVER, said.WorkerLost(U2, "it was killed"))
        assert desk.operate("gradient", "a", GRADIENT) == []
        assert given(desk.join(server_hello("other", "u"))) == [("gradient", U0)]

    @pytest.mark.parametrize("lost", [(U2,), (R0, R1)])
    def test_after_its_deadline_it_stops_and_names_what_is_lacking(self, lost: tuple[WorkerName, ...]) -> None:
        desk = updating()
        desk.says(SERVER, *(said.WorkerLost(worker, "it was killed") for worker in lost))
        desk.now = 59.0
        desk.says(HOST, said.Heartbeat())
        desk.says(SERVER, said.Heartbeat())
        assert of(RunStopped, desk.keep(desk.core.tick(desk.now))) == []
        desk.now = 60.0
        (stopped,) = of(RunStopped, desk.keep(desk.core.tick(desk.now)))
        kind = "update" if lost == (U2,) else "rollout"
        assert (
            f"its last {kind} worker {lost[-1]} was lost: it was killed, and no other has come in 60 s"
            in stopped.reason
        )
        assert not desk.core.runs

    def test_after_its_last_round_too_it_waits_no_longer_than_that(self) -> None:
        """States are still saved then, and agents that may lag still update."""
        desk = updating()
        assert "Opened" in kinds(desk.says(HOST, arrival("a", 1, UPDATE, END, 0)))
        assert desk.core.runs[RUN].rounds.finished
        desk.operate("save", "a", SaveState())
        desk.says(SERVER, said.WorkerLost(U2, "it was killed"))
        desk.now = 60.0
        assert len(of(RunStopped, desk.keep(desk.core.tick(desk.now)))) == 1

    def test_turns_wait_for_a_rollout_worker_and_go_to_it_once_it_has_loaded(self) -> None:
        desk = admitted(run_spec(agent("a"), worker_deadline=60.0))
        desk.publish("attach", "a", Attach(LoraSpec()), 0)
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        desk.says(HOST, turn(0, seat()))
        assert kinds(desk.says(SERVER, said.WorkerLost(R0, "x"), said.WorkerLost(R1, "x"))) == ["Generate"]  # R1's
        sends = desk.join(server_hello("other", "r"))
        assert [(each.worker, each.version) for each in of(Load, sends)] == [("other/r0", version("a", 0))]
        assert of(Generate, sends) == []
        (asked,) = desk.says(OTHER, loaded(WorkerName("other/r0"), "a", 0))
        assert isinstance(asked, Generate)

    def test_turns_that_nobody_answers_close_at_their_deadline(self) -> None:
        desk = admitted(run_spec(agent("a"), worker_deadline=60.0))
        desk.publish("attach", "a", Attach(LoraSpec()), 0)
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        desk.says(HOST, turn(0, seat()))
        desk.says(SERVER, said.WorkerLost(R0, "x"), said.WorkerLost(R1, "x"))
        assert len(of(TurnClosed, desk.keep(desk.core.tick(20.0)))) == 1

    def test_a_barrier_does_not_open_on_a_version_that_nobody_serves(self) -> None:
        desk = admitted(run_spec(agent("a"), worker_deadline=60.0))
        desk.publish("attach", "a", Attach(LoraSpec()), 0)
        desk.says(SERVER, said.WorkerLost(R0, "x"), said.WorkerLost(R1, "x"))
        assert desk.says(HOST, arrival("a", 1, ROLLOUT, START)) == []
        desk.join(server_hello("other", "r"))
        assert "Opened" in kinds(desk.says(OTHER, loaded(WorkerName("other/r0"), "a", 0)))


class TestDeadlinesOfOperations:
    def hung(self, *others: str) -> tuple[Desk, list[object]]:
        """The gradient is not done by its deadline."""
        desk = updating(operation_deadline=10.0)
        for kinds_of_other in others:
            desk.join(server_hello("other", kinds_of_other))
        desk.operate("gradient", "a", GRADIENT)
        for now in (0.0, 9.0):
            desk.now = now
            assert kinds(desk.keep(desk.core.tick(now))) == []
        desk.now = 10.0
        sends = [each for each in desk.keep(desk.core.tick(10.0)) if not isinstance(each, Missing)]
        assert desk.core.counts["operations past their deadline"] == 1
        return desk, sends

    def test_a_hung_worker_is_given_up_and_another_does_it(self) -> None:
        desk, sends = self.hung("u")
        assert given(sends) == [("gradient", U0)]
        assert desk.says(SERVER, done("gradient", Measured(()))) == []  # it has woken up
        assert kinds(desk.says(OTHER, done("gradient", Measured(()), U0))) == ["OperationDone"]

    def test_the_run_does_not_go_back_to_it(self) -> None:
        desk, _ = self.hung()
        desk.join(replace(server_hello(), incarnation=1))
        assert desk.core.runs[RUN].lacks == "update worker"
        assert "ForwardBackward of a was not done in 10 s (operation_deadline)" in desk.core.runs[RUN].why
        assert given(desk.join(server_hello("other", "u"))) == [("gradient", U0)]

    def test_a_new_process_of_its_name_is_not_the_hung_one(self) -> None:
        desk, _ = self.hung()
        desk.keep(desk.core.lose(SERVER, "its connection was closed", desk.now))
        assert given(desk.join(replace(server_hello(), pid=77))) == [("gradient", U2)]

    def test_each_worker_has_the_whole_time(self) -> None:
        desk, _ = self.hung("u")
        desk.keep(desk.core.tick(10.0))
        assert kinds(desk.keep(desk.core.tick(19.9))) in ([], ["Missing"])
        assert U0 not in desk.core.runs[RUN].spurned


class TestStates:
    def test_a_run_may_begin_with_saved_states_and_goes_on_after_its_rounds(self) -> None:
        desk = admitted(run_spec(agent("a"), rounds=5, done=3))
        assert given(desk.operate("load", "a", LoadState(blob("state"), 3))) == [("load", U2)]
        sends = desk.says(SERVER, done("load", Published(version("a", 3), blob("a3"))))
        assert len(of(Load, sends)) == 2
        for worker in (R0, R1):
            desk.says(SERVER, loaded(worker, "a", 3))
        (opened,) = of(Opened, desk.says(HOST, arrival("a", 4, ROLLOUT, START, 3)))
        assert opened.round == 4

    def test_a_policy_that_is_there_is_not_loaded_over(self) -> None:
        desk = updating()
        (failed,) = of(OperationFailed, desk.operate("load", "a", LoadState(blob("state"), 1)))
        assert "is attached already" in failed.reason

    def test_a_state_is_saved_at_any_time_and_answered_by_one(self) -> None:
        desk = updating()
        assert given(desk.operate("save", "a", SaveState())) == [("save", U2)]
        (failed,) = desk.says(SERVER, done("save", Measured(())))
        assert isinstance(failed, OperationFailed) and "expected was Saved" in failed.reason
        desk.operate("again", "a", SaveState())
        (told,) = desk.says(SERVER, done("again", Saved(blob("state"))))
        assert isinstance(told, OperationDone)
        desk.publish("publish", "a", Publish(1), 1)
        assert "Opened" in kinds(desk.says(HOST, arrival("a", 1, UPDATE, END, 1)))

    @pytest.mark.parametrize("done_rounds", [-1, 5, 6])
    def test_a_run_with_no_round_to_go_on_with_is_refused(self, done_rounds: int) -> None:
        desk = admitted(run_spec(agent("a"), rounds=5, done=done_rounds))
        assert not desk.core.runs and desk.core.counts["refused Submit"] == 1
