"""The coordinator as a whole: admission, operations, losses, refusals, repeated messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

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
    arrivals,
    blob,
    canonical,
    host_hello,
    request,
    run_spec,
    server_hello,
    turn,
    version,
)

from coordinator.core.coordinator import NOTICE, Coordinator
from coordinator.core.run import STORED
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, ForwardBackward, Measured, OptimStep, Publish, Published, Score, Scored
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import Generated, Hello, Operate, RunSpec, SeatRequest, ToCoordinator
from tinker.protocol.to_host import (
    Admitted,
    MayUpdate,
    Missing,
    Opened,
    OperationDone,
    OperationFailed,
    Play,
    Queued,
    RunStopped,
    TurnClosed,
    TurnRefused,
)
from tinker.protocol.to_taskserver import Cancel, Forget, Generate, Load, Release, Unload, Work
from tinker.protocol.values import (
    BASE,
    AdamSpec,
    AgentName,
    Ended,
    EpisodeId,
    LoraSpec,
    LossSpec,
    OpId,
    PeerName,
    PolicyName,
    RunId,
    WorkerName,
)

T = TypeVar("T")
HOST, SERVER = PeerName("host"), PeerName("server")
R0, R1, U2, F3 = (WorkerName(f"server/{name}") for name in ("r0", "r1", "u2", "f3"))


@dataclass
class Desk:
    """One coordinator to talk to. `said` returns what it sends; `heard` keeps everything."""

    core: Coordinator = field(default_factory=lambda: Coordinator(PeerName("coordinator")))
    now: float = 0.0
    heard: list[tuple[PeerName, object]] = field(default_factory=list)

    def join(self, hello: Hello) -> list[object]:
        return self.keep(self.core.join(hello, self.now))

    def says(self, peer: PeerName, *messages: ToCoordinator) -> list[object]:
        return [sent for message in messages for sent in self.keep(self.core.step(peer, message, self.now))]

    def keep(self, sends: list[tuple[PeerName, object]]) -> list[object]:
        assert self.core.violations() == []
        self.heard += sends
        return [message for _, message in sends]

    def operate(self, op: str, who: str, operation: object) -> list[object]:
        return self.says(HOST, asked(op, who, operation))

    def publish(
        self, op: str, who: str, operation: object, number: int, workers: tuple[WorkerName, ...] = (R0, R1)
    ) -> list[object]:
        """The operation is done and its version loaded everywhere."""
        self.operate(op, who, operation)
        sends = self.says(SERVER, done(op, Published(version(who, number), blob(f"{who}{number}"))))
        return sends + [sent for worker in workers for sent in self.says(SERVER, loaded(worker, who, number))]


def asked(op: str, who: str, operation: object) -> Operate:
    return Operate(RUN, OpId(op), AgentName(who), PolicyName(f"policy of {who}"), operation)  # type: ignore[arg-type]


def done(op: str, result: object, worker: WorkerName = U2) -> said.WorkerDone:
    return said.WorkerDone(RUN, OpId(op), worker, result)  # type: ignore[arg-type]


def loaded(worker: WorkerName, who: str, number: int) -> said.Loaded:
    return said.Loaded(RUN, worker, version(who, number), f"{who}{number}")


def kinds(sends: list[object]) -> list[str]:
    return [type(message).__name__ for message in sends]


def of(kind: type[T], sends: list[object]) -> list[T]:
    return [message for message in sends if isinstance(message, kind)]


def seat(name: str = "x", who: str = "a", number: int = 0) -> SeatRequest:
    return request(name, version(who, number))


def admitted(spec: RunSpec | None = None, workers: str = "rruf") -> Desk:
    desk = Desk()
    desk.join(host_hello())
    desk.join(server_hello(kinds=workers))
    desk.says(HOST, said.Submit(spec or run_spec()))
    return desk


def playing(spec: RunSpec | None = None) -> Desk:
    """Round 1 is being rolled out; both agents play version 0."""
    desk = admitted(spec)
    for who in "ab":
        desk.publish(f"attach {who}", who, Attach(LoraSpec()), 0)
    desk.says(HOST, arrival("a", 1, ROLLOUT, START), arrival("b", 1, ROLLOUT, START))
    return desk


def updating(**changes: object) -> Desk:
    desk = playing(run_spec(**changes))
    desk.says(HOST, *(said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
    desk.says(HOST, arrival("a", 1, UPDATE, START), arrival("b", 1, UPDATE, START))
    return desk


class TestAdmission:
    def test_a_run_waits_in_the_queue_until_somebody_can_serve_it(self) -> None:
        desk = Desk()
        desk.join(host_hello())
        (queued,) = desk.says(HOST, said.Submit(run_spec()))
        assert isinstance(queued, Queued) and "start one with `opentinker taskserver`" in queued.reason
        assert kinds(desk.join(server_hello("rollouts", "r"))) == ["Welcome"]
        assert kinds(desk.join(server_hello("updates", "u"))) == ["Welcome", "Admitted"]

    def test_it_waits_for_its_own_model_and_names_those_that_are_there(self) -> None:
        desk = Desk()
        desk.join(host_hello())
        desk.join(server_hello("other", model="m2"))
        (queued,) = desk.says(HOST, said.Submit(run_spec(model="m1")))
        assert isinstance(queued, Queued) and "model m2" in queued.reason
        desk.join(server_hello("right"))
        assert desk.core.runs[RUN].model == "m1"

    def test_a_run_without_wishes_takes_the_first_model_that_can_serve_it(self) -> None:
        desk = Desk()
        desk.join(host_hello())
        desk.join(server_hello("rollouts", "r", model="m2"))
        desk.join(server_hello("both", "ru", model="m1"))
        (told,) = desk.says(HOST, said.Submit(run_spec()))
        assert isinstance(told, Admitted) and told.model.digest == "m1" and told.data == "data of both"

    def test_a_server_with_another_model_never_serves_the_run_even_when_the_first_has_left(self) -> None:
        desk = Desk()
        for hello in (
            host_hello(),
            server_hello("first", "r"),
            server_hello("other", "r", model="m2"),
            server_hello("last", "ru"),
        ):
            desk.join(hello)
        desk.says(HOST, said.Submit(run_spec()))
        desk.core.lose(PeerName("first"), "gone", 0.0)
        desk.join(server_hello("another", "r", model="m2"))
        assert set(desk.core.runs[RUN].owners.values()) == {"last"}

    def test_submitting_again_gives_the_same_answer_and_starts_nothing(self) -> None:
        desk = admitted()
        before = canonical(desk.core.runs)
        (again,) = desk.says(HOST, said.Submit(run_spec()))
        assert isinstance(again, Admitted) and canonical(desk.core.runs) == before

    def test_another_run_under_a_taken_name_is_refused(self) -> None:
        (refused,) = admitted().says(HOST, said.Submit(run_spec(rounds=7)))
        assert isinstance(refused, Refused) and "submit under another id" in refused.reason

    def test_a_run_that_has_ended_is_not_started_by_an_old_submit(self) -> None:
        desk = admitted()
        assert kinds(desk.says(HOST, said.EndRun(RUN, "done"))) == ["Release"]
        assert kinds(desk.says(HOST, said.Submit(run_spec()))) == ["Refused"]

    def test_a_queued_run_can_be_ended(self) -> None:
        desk = Desk()
        desk.join(host_hello())
        desk.says(HOST, said.Submit(run_spec()), said.EndRun(RUN, "changed my mind"))
        assert desk.core.queue == {} and kinds(desk.join(server_hello())) == ["Welcome"]


class TestOperations:
    def test_a_published_version_is_loaded_by_every_rollout_worker(self) -> None:
        desk = admitted()
        (work,) = desk.operate("op", "a", Attach(LoraSpec()))
        assert isinstance(work, Work) and work.worker == U2
        sends = desk.says(SERVER, done("op", Published(version("a", 0), blob("a0"))))
        assert [load.worker for load in of(Load, sends)] == [R0, R1] and of(OperationDone, sends)

    def test_an_operation_takes_effect_once_and_is_answered_again_from_the_store(self) -> None:
        desk = admitted()
        first = desk.operate("op", "a", Attach(LoraSpec()))
        assert desk.operate("op", "a", Attach(LoraSpec())) == first  # it may have been lost; its worker does it once
        sends = desk.says(SERVER, done("op", Published(version("a", 0), blob("a0"))))
        assert desk.operate("op", "a", Attach(LoraSpec())) == of(OperationDone, sends)
        assert desk.says(SERVER, done("op", Published(version("a", 0), blob("a0")))) == []

    def test_scoring_goes_to_the_forward_worker(self) -> None:
        (work,) = admitted().operate("op", "a", Score(blob("rows"), BASE))
        assert isinstance(work, Work) and work.worker == F3
        (failed,) = admitted(workers="rru").operate("op", "a", Score(blob("rows"), BASE))
        assert isinstance(failed, OperationFailed) and "no forward worker" in failed.reason

    @pytest.mark.parametrize(
        "operation", [OptimStep(AdamSpec(1.0)), Publish(1), ForwardBackward(blob("b"), LossSpec("x"))]
    )
    def test_weights_do_not_move_outside_the_update_gate(self, operation: object) -> None:
        (failed,) = playing().operate("early", "a", operation)
        assert isinstance(failed, OperationFailed) and "may not update now" in failed.reason

    def test_a_policy_of_somebody_else_is_refused(self) -> None:
        desk = updating()
        message = replace(asked("op", "a", OptimStep(AdamSpec(1.0))), policy=PolicyName("policy of b"))
        (failed,) = desk.says(HOST, message)
        assert isinstance(failed, OperationFailed) and "does not own" in failed.reason

    def test_a_policy_is_attached_once(self) -> None:
        desk = admitted()
        desk.operate("one", "a", Attach(LoraSpec()))
        assert kinds(desk.operate("two", "a", Attach(LoraSpec()))) == ["OperationFailed"]

    @pytest.mark.parametrize(
        ("operation", "result"),
        [
            (Publish(1), Published(version("a", 2), blob("x"))),
            (Publish(1), Published(version("b", 1), blob("x"))),
            (Publish(1), Measured(())),
            (OptimStep(AdamSpec(1.0)), Scored(blob("x"))),
            (Publish(0), Published(version("a", 0), blob("x"))),
        ],
    )
    def test_a_result_that_does_not_answer_the_operation_is_its_failure(
        self, operation: object, result: object
    ) -> None:
        desk = updating()
        desk.operate("op", "a", operation)
        assert kinds(desk.says(SERVER, done("op", result))) == ["OperationFailed"]

    def test_an_agent_arrives_only_when_its_operations_are_done(self) -> None:
        desk = updating()
        desk.operate("op", "a", Publish(1))
        (refused,) = desk.says(HOST, arrival("a", 1, UPDATE, END, 0))
        assert isinstance(refused, Refused) and "op is still running" in refused.reason

    def test_an_agent_that_has_arrived_may_not_move_its_weights_any_more(self) -> None:
        desk = updating()
        desk.operate("op", "a", Publish(1))
        desk.says(SERVER, done("op", Published(version("a", 1), blob("a1"))))
        assert desk.says(HOST, arrival("a", 1, UPDATE, END, 1)) == []  # held: its version is loading
        (failed,) = desk.operate("late", "a", Publish(2))
        assert isinstance(failed, OperationFailed) and "may not update now" in failed.reason

    def test_the_store_of_outcomes_is_bounded(self) -> None:
        desk = playing()
        for number in range(STORED + 50):
            desk.operate(f"refused {number}", "a", Publish(1))
        assert len(desk.core.runs[RUN].outcomes) == STORED


class TestRounds:
    def test_a_whole_round_from_arrival_to_arrival(self) -> None:
        desk = updating(update_order=(("b",), ("a",)))
        assert [gate.agent for gate in of(MayUpdate, [m for _, m in desk.heard])] == ["b"]
        desk.publish("publish b", "b", Publish(1), 1)
        (gate,) = desk.says(HOST, arrival("b", 1, UPDATE, END, 1))
        assert isinstance(gate, MayUpdate) and gate.agent == "a"
        desk.publish("publish a", "a", Publish(1), 1)
        (opened,) = desk.says(HOST, arrival("a", 1, UPDATE, END, 1))
        assert isinstance(opened, Opened) and opened.versions == (version("a", 1), version("b", 1))
        assert desk.core.runs[RUN].rounds.finished

    def test_an_agent_is_held_until_every_rollout_worker_serves_its_version(self) -> None:
        desk = admitted(run_spec(agent("a")))
        desk.publish("attach", "a", Attach(LoraSpec()), 0, workers=(R0,))
        assert desk.says(HOST, arrival("a", 1, ROLLOUT, START)) == []
        assert kinds(desk.says(SERVER, loaded(R1, "a", 0))) == ["Opened", "Play"]

    def test_it_is_let_in_too_when_the_worker_it_was_held_for_is_lost(self) -> None:
        desk = admitted(run_spec(agent("a")))
        desk.publish("attach", "a", Attach(LoraSpec()), 0, workers=(R0,))
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        assert kinds(desk.says(SERVER, said.WorkerLost(R1, "it died"))) == ["Opened", "Play"]

    @pytest.mark.parametrize("number", [-1, 1, 5])
    def test_an_arrival_with_a_version_that_is_not_current_is_refused_at_once(self, number: int) -> None:
        for desk in (admitted(), playing(run_spec(agent("a"), agent("b"), agent("c")))):
            assert kinds(desk.says(HOST, arrival("a", 1, ROLLOUT, START, number))) == ["Refused"]

    def test_of_all_agents_that_come_together_one_with_another_version_is_refused_and_nobody_has_come(self) -> None:
        desk = admitted(run_spec(agent("a"), agent("b")))
        for who in "ab":
            desk.publish(f"attach {who}", who, Attach(LoraSpec()), 0)
        together = arrivals("ab", 1, ROLLOUT, START)
        (refused,) = desk.says(HOST, replace(together, versions=(0, 1)))
        assert isinstance(refused, Refused) and "b arrives with version 1" in refused.reason
        assert desk.core.runs[RUN].rounds.barrier.arrived == ()
        assert kinds(desk.says(HOST, together)) == ["Opened", "Play"]

    def test_of_all_agents_that_come_together_one_whose_version_is_loading_is_held(self) -> None:
        desk = admitted(run_spec(agent("a"), agent("b")))
        desk.publish("attach a", "a", Attach(LoraSpec()), 0)
        desk.publish("attach b", "b", Attach(LoraSpec()), 0, workers=(R0,))
        assert desk.says(HOST, arrivals("ab", 1, ROLLOUT, START)) == []
        assert set(desk.core.runs[RUN].rounds.held) == {"b"}
        assert kinds(desk.says(SERVER, loaded(R1, "b", 0))) == ["Opened", "Play"]

    def test_an_old_arrival_is_answered_from_the_store_after_the_version_has_moved(self) -> None:
        desk = updating()
        desk.publish("publish a", "a", Publish(1), 1)
        (opened,) = desk.says(HOST, arrival("a", 1, ROLLOUT, START, 0))
        assert isinstance(opened, Opened) and (opened.phase, opened.edge) == (ROLLOUT, START)

    def test_old_versions_are_unloaded_and_the_one_before_stays(self) -> None:
        desk = updating(rounds=3)
        for round in (1, 2):
            desk.publish(f"publish {round}", "a", Publish(round), round)
            sends = desk.says(HOST, arrival("a", round, UPDATE, END, round), arrival("b", round, UPDATE, END, 0))
            assert {each.version for each in of(Unload, sends)} == ({version("a", 0)} if round == 2 else set())
            if round == 2:
                break
            desk.says(HOST, arrival("a", 2, ROLLOUT, START, 1), arrival("b", 2, ROLLOUT, START, 0))
            desk.says(HOST, *(said.EpisodeEnded(RUN, EpisodeId(2, ROLLOUT, k), Ended.FINISHED) for k in (0, 1)))
            desk.says(HOST, arrival("a", 2, UPDATE, START, 1), arrival("b", 2, UPDATE, START, 0, samples=0))

    def test_who_is_missing_is_told_every_ten_seconds(self) -> None:
        desk = admitted()
        desk.publish("attach", "a", Attach(LoraSpec()), 0)
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        assert desk.keep(desk.core.tick(NOTICE - 0.1)) == []
        (missing,) = desk.keep(desk.core.tick(NOTICE))
        assert isinstance(missing, Missing) and (missing.arrived, missing.missing) == (("a",), ("b",))
        assert desk.keep(desk.core.tick(NOTICE + 5)) == []


class TestTurns:
    def test_a_turn_of_two_seats_is_asked_and_closed(self) -> None:
        desk = playing()
        sends = desk.says(HOST, turn(0, seat("x", "a"), seat("y", "b")))
        assert [each.worker for each in of(Generate, sends)] == [R0, R1]
        second, first = (answer(each) for each in reversed(of(Generate, sends)))
        assert desk.says(SERVER, second) == []
        (closed,) = desk.says(SERVER, first)
        assert isinstance(closed, TurnClosed) and [each.seat for each in closed.results] == ["x", "y"]

    def test_a_repeated_open_turn_asks_the_same_worker_again_and_then_gets_the_stored_answer(self) -> None:
        desk = playing()
        opened = turn(0, seat())
        (asked_,) = desk.says(HOST, opened)
        assert desk.says(HOST, opened) == [asked_]
        assert isinstance(asked_, Generate)
        closed = desk.says(SERVER, answer(asked_))
        assert desk.says(HOST, opened) == closed

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (turn(0, seat(number=1)), "this round plays policy of a@0"),
            (turn(0, seat(who="z")), "has no policy 'policy of z'"),
            (turn(0, seat(), index=7), "is not being played"),
            (turn(0, seat(), round=2), "is not being played"),
            (turn(0), "at least one seat"),
            (replace(turn(0, seat()), turn=replace(turn(0).turn, run=RunId("other"))), "has no run 'other'"),
        ],
    )
    def test_what_may_not_be_played_is_refused_and_counted(self, wrong: said.OpenTurn, why: str) -> None:
        desk = playing()
        before = canonical((desk.core.runs, desk.core.turns.tables))
        (refused,) = desk.says(HOST, wrong)
        assert isinstance(refused, TurnRefused) and why in refused.reason
        assert (
            desk.core.counts["refused OpenTurn"] == 1 and canonical((desk.core.runs, desk.core.turns.tables)) == before
        )

    def test_a_request_keeps_its_worker_from_turn_to_turn(self) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat("x", "a"))))
        desk.says(HOST, turn(0, seat("x", "b"), index=1))
        desk.says(SERVER, answer(first))
        (second,) = of(Generate, desk.says(HOST, turn(1, seat("x", "a"))))
        assert first.worker == second.worker == R0

    def test_a_failed_request_goes_to_another_worker(self) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat())))
        (second,) = desk.says(SERVER, said.GenerateFailed(first.turn, first.seat, first.worker, "out of memory"))
        assert isinstance(second, Generate) and {first.worker, second.worker} == {R0, R1}

    @pytest.mark.parametrize("change", [{"version": version("a", 1)}, {"version": BASE}, {"logprobs": b""}])
    def test_an_answer_of_other_weights_or_without_logprobs_is_never_used(self, change: dict[str, object]) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat())))
        (second,) = desk.says(SERVER, answer(first, **change))
        assert isinstance(second, Generate) and desk.core.counts["refused answers"] == 1
        assert desk.says(SERVER, answer(first)) == []
        (closed,) = desk.says(SERVER, answer(second))
        assert isinstance(closed, TurnClosed) and closed.results[0].version == version("a", 0)

    def test_a_lost_worker_s_requests_go_to_another_that_serves_the_version(self) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat())))
        (second,) = desk.says(SERVER, said.WorkerLost(first.worker, "it died"))
        assert isinstance(second, Generate) and second.worker == R1
        assert desk.says(SERVER, answer(first)) == [] and desk.core.counts["messages of lost workers"] == 1
        assert kinds(desk.says(SERVER, answer(second))) == ["TurnClosed"]

    def test_a_worker_that_could_not_load_a_version_serves_the_run_no_longer(self) -> None:
        desk = playing()
        desk.says(HOST, turn(0, seat()))
        sends = desk.says(SERVER, said.LoadFailed(RUN, R0, version("a", 0), "disk full"))
        assert kinds(sends) == ["Cancel", "Generate"] and desk.core.runs[RUN].versions.workers == {R1}
        assert desk.core.turns.in_flight[R0] == 0

    def test_a_worker_that_loaded_other_weights_serves_the_run_no_longer(self) -> None:
        desk = admitted(run_spec(agent("a")))
        desk.publish("attach", "a", Attach(LoraSpec()), 0, workers=(R0,))
        desk.says(HOST, arrival("a", 1, ROLLOUT, START))
        sends = desk.says(SERVER, said.Loaded(RUN, R1, version("a", 0), "other weights"))
        assert kinds(sends) == ["Opened", "Play"] and desk.core.runs[RUN].versions.workers == {R0}

    def test_past_its_deadline_a_turn_closes_with_a_forfeit_and_the_late_answer_is_fenced_off(self) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat())))
        assert first.deadline == 20.0
        sends = desk.keep(desk.core.tick(20.0))
        assert [kind for kind in kinds(sends) if kind != "Missing"] == ["Cancel", "TurnClosed"]
        assert desk.says(SERVER, answer(first)) == [] and desk.core.counts["refused answers"] == 1

    def test_a_request_that_is_sent_again_gets_only_the_time_that_is_left(self) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat())))
        desk.now = 15.0
        (second,) = desk.says(SERVER, said.GenerateFailed(first.turn, first.seat, first.worker, "out of memory"))
        assert isinstance(second, Generate) and second.deadline == 5.0

    def test_the_end_of_an_episode_cancels_what_is_open_and_forgets_its_cache(self) -> None:
        desk = playing()
        desk.says(HOST, turn(0, seat()))
        sends = desk.says(HOST, said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, 0), Ended.FAILED))
        assert [type(each) for each in sends] == [Cancel, Forget] and not desk.core.turns.tables

    def test_a_server_that_joins_later_is_used_once_it_has_loaded(self) -> None:
        desk = playing()
        sends = desk.join(server_hello("more", "r"))
        assert [each.version for each in of(Load, sends)] == [version("a", 0), version("b", 0)]
        late, more = WorkerName("more/r0"), PeerName("more")
        workers = lambda: desk.core.runs[RUN].versions.serving(version("a", 0))  # noqa: E731
        assert late not in workers()
        desk.says(more, loaded(late, "a", 0))
        assert late in workers()

    def test_a_request_that_nobody_could_take_is_sent_as_soon_as_somebody_serves_its_version(self) -> None:
        desk = playing()
        desk.join(server_hello("more", "r"))
        desk.says(SERVER, said.WorkerLost(R0, "x"), said.WorkerLost(R1, "x"))
        assert desk.says(HOST, turn(0, seat())) == []
        (sent,) = desk.says(PeerName("more"), loaded(WorkerName("more/r0"), "a", 0))
        assert isinstance(sent, Generate) and sent.worker == "more/r0"


class TestLosses:
    def test_without_its_update_worker_a_run_stops_and_says_what_to_do(self) -> None:
        desk = playing()
        sends = desk.says(SERVER, said.WorkerLost(U2, "out of memory"))
        (stopped,) = of(RunStopped, sends)
        assert "out of memory" in stopped.reason and "submit a new run" in stopped.reason and of(Release, sends)

    def test_without_any_rollout_worker_a_run_stops(self) -> None:
        desk = playing()
        desk.says(HOST, turn(0, seat()))
        sends = desk.says(SERVER, said.WorkerLost(R0, "x"), said.WorkerLost(R1, "x"))
        assert len(of(RunStopped, sends)) == 1 and not desk.core.runs and not desk.core.turns.tables

    def test_what_a_lost_worker_was_asked_to_do_has_failed(self) -> None:
        desk = playing()
        desk.operate("score", "a", Score(blob("rows"), BASE))
        (failed,) = of(OperationFailed, desk.says(SERVER, said.WorkerLost(F3, "x")))
        assert failed.op == "score" and kinds(desk.operate("again", "a", Score(blob("rows"), BASE))) == [
            "OperationFailed"
        ]

    def test_with_its_host_a_run_ends(self) -> None:
        desk = playing()
        desk.says(HOST, turn(0, seat()))
        sends = desk.keep(desk.core.lose(HOST, "gone", 1.0))
        assert [type(each) for each in sends] == [Cancel, Forget, Release] and not desk.core.runs

    def test_who_leaves_on_purpose_is_gone(self) -> None:
        desk = playing()
        desk.says(HOST, said.Bye("done"))
        assert HOST not in desk.core.roster.peers and not desk.core.runs

    def test_who_is_silent_for_two_leases_is_lost_and_a_heartbeat_is_enough(self) -> None:
        desk = playing()
        desk.now = 20.0
        desk.says(HOST, said.Heartbeat())
        desk.keep(desk.core.tick(30.1))
        assert set(desk.core.roster.peers) == {HOST}

    def test_who_was_given_up_must_say_hello_again(self) -> None:
        desk = playing()
        desk.core.lose(SERVER, "silent", 40.0)
        (refused,) = desk.says(SERVER, said.Heartbeat())
        assert isinstance(refused, Refused) and "say Hello first" in refused.reason
        assert kinds(desk.join(server_hello())) == ["Welcome"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("peer", "message"),
        [
            (HOST, loaded(R0, "a", 0)),
            (SERVER, said.Submit(run_spec(run="mine"))),
            (SERVER, turn(0, seat())),
            (HOST, host_hello("other")),
            (PeerName("other"), said.EndRun(RUN, "not yours")),
            (PeerName("other"), arrival("a", 1, UPDATE, START)),
            (PeerName("other"), asked("op", "a", Publish(1))),
            (PeerName("other"), said.EpisodeEnded(RUN, EpisodeId(1, ROLLOUT, 0), Ended.FINISHED)),
            (PeerName("more"), loaded(R0, "a", 0)),
            (PeerName("more"), said.WorkerLost(U2, "not yours")),
            (PeerName("stranger"), said.Heartbeat()),
            (HOST, said.EndRun(RunId("other"), "")),
            (HOST, said.Submit(run_spec(run="new", rounds=0))),
            (SERVER, loaded(R0, "a", 4)),
        ],
    )
    def test_what_a_peer_may_not_say_is_refused_counted_and_changes_nothing(
        self, peer: PeerName, message: ToCoordinator
    ) -> None:
        desk = playing()
        desk.join(host_hello("other"))
        desk.join(server_hello("more", "r"))
        state = lambda: canonical((desk.core.runs, desk.core.turns.tables, desk.core.queue))  # noqa: E731
        before = state()
        ((to, refused),) = desk.core.step(peer, message, 1.0)
        assert to == peer and isinstance(refused, Refused | TurnRefused) and state() == before
        assert desk.core.counts[f"refused {type(message).__name__}"] == 1

    def test_answers_for_ended_runs_are_counted_and_nothing_else(self) -> None:
        desk = playing()
        (first,) = of(Generate, desk.says(HOST, turn(0, seat())))
        desk.says(HOST, said.EndRun(RUN, "done"))
        late: list[Generated | said.Loaded] = [answer(first), loaded(R0, "a", 0)]
        assert desk.says(SERVER, *late) == [] and desk.core.counts["late messages of ended runs"] == 2

    def test_everybody_who_joins_is_welcomed(self) -> None:
        desk = Desk()
        assert desk.join(host_hello()) == [Welcome(PeerName("coordinator"), 1, 15.0)]

    def test_episodes_are_given_out_group_by_group(self) -> None:
        desk = playing(run_spec(groups=2, group_size=3))
        plays = of(Play, [message for _, message in desk.heard])
        assert [[e.index for e in play.episodes] for play in plays] == [[0, 1, 2], [3, 4, 5]]
