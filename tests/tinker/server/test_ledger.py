"""What a task server does when it is asked again."""

from __future__ import annotations

from tinker.protocol.operations import Measured, OptimStep
from tinker.protocol.to_coordinator import Generated, GenerateFailed, Held, Loaded, WorkerDone, WorkerFailed
from tinker.protocol.to_taskserver import Cancel, Forget, Generate, Load, Release, Unload, Work
from tinker.protocol.values import (
    AdamSpec,
    BlobRef,
    EpisodeId,
    Finish,
    OpId,
    Phase,
    PolicyName,
    PolicyVersion,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
    pack_floats,
    pack_ids,
)
from tinker.server import ledger as ledgers
from tinker.server.ledger import Ledger

RUN, W, SEAT = RunId("run"), WorkerName("w"), SeatName("ann")
V = PolicyVersion(PolicyName("p"), 1)
TURN = TurnId(RUN, EpisodeId(1, Phase.ROLLOUT, 0), 3)
GENERATE = Generate(TURN, SEAT, W, V, pack_ids([1]), Sampling(4), 20.0)
GENERATED = Generated(TURN, SEAT, W, pack_ids([2]), pack_floats([-1.0]), Finish.STOP, V)
LOAD = Load(RUN, W, V, BlobRef("b", "digest", 1, "here", "/nowhere", ""))
LOADED = Loaded(RUN, W, V, "digest")
WORK = Work(RUN, OpId("op"), W, PolicyName("p"), OptimStep(AdamSpec(1.0)))


def test_what_is_being_done_is_not_begun_again() -> None:
    ledger = Ledger()
    for message in (GENERATE, LOAD, WORK):
        assert ledger.begin(message) is None
        assert ledger.begin(message) is message


def test_jobs_are_counted_once_by_how_they_ended() -> None:
    ledger = Ledger()
    for message in (GENERATE, LOAD, WORK):
        ledger.begin(message)
    for _ in range(2):
        ledger.answer(GENERATED)
        ledger.answer(WorkerFailed(RUN, OpId("op"), W, "why"))
    assert ledger.ended == {("generate", "done"): 1, ("operation", "failed"): 1}
    ledger.begin(Generate(TURN, SeatName("bob"), W, V, pack_ids([1]), Sampling(4), 20.0))
    ledger.begin(Work(RUN, OpId("another"), W, PolicyName("p"), OptimStep(AdamSpec(1.0))))
    ledger.lose(WorkerName("another"))
    assert len(ledger.begun) == 3
    ledger.lose(W)
    assert {job: number for (job, how), number in ledger.ended.items() if how == "lost"} == {
        "generate": 1,
        "load": 1,
        "operation": 1,
    }


def test_what_was_done_is_answered_as_before() -> None:
    ledger = Ledger()
    answers = (GENERATED, LOADED, WorkerDone(RUN, OpId("op"), W, Measured(())))
    for message, answer in zip((GENERATE, LOAD, WORK), answers, strict=True):
        ledger.begin(message)
        ledger.answer(answer)
        assert ledger.begin(message) == answer
    assert not ledger.begun


def test_a_failed_operation_stays_failed_and_a_failed_request_is_tried_again() -> None:
    ledger = Ledger()
    failed = WorkerFailed(RUN, OpId("op"), W, "not finite")
    ledger.begin(WORK)
    ledger.answer(failed)
    assert ledger.begin(WORK) == failed
    ledger.begin(GENERATE)
    ledger.answer(GenerateFailed(TURN, SEAT, W, "out of memory"))
    assert ledger.begin(GENERATE) is None


def test_what_nobody_wants_any_more_is_begun_anew_when_it_is_asked_for() -> None:
    ledger = Ledger()
    ledger.begin(GENERATE)
    ledger.take(Cancel(TURN, SEAT, W))
    assert ledger.begin(GENERATE) is None


def test_other_weights_under_a_held_version_are_loaded_and_refused_by_the_engine() -> None:
    ledger = Ledger()
    ledger.answer(LOADED)
    assert ledger.begin(Load(RUN, W, V, BlobRef("b", "another", 1, "here", "/nowhere", ""))) is None


def test_held_versions_are_told_until_they_are_unloaded_released_or_their_worker_dies() -> None:
    for end in (Unload(RUN, W, V), Release(RUN), None):
        ledger = Ledger()
        ledger.answer(LOADED)
        assert ledger.held() == (Held(RUN, W, V, "digest"),)
        if end is None:
            ledger.lose(W)
        else:
            ledger.take(end)
        assert ledger.held() == ()


def test_answers_go_with_their_episode_or_run_and_are_bounded() -> None:
    ledger = Ledger()
    ledger.answer(GENERATED)
    ledger.take(Forget(RUN, TURN.episode))
    assert ledger.begin(GENERATE) is None
    for number in range(ledgers.KEPT + 5):
        ledger.answer(WorkerFailed(RUN, OpId(f"op{number}"), W, "why"))
    assert len(ledger._worked) == ledgers.KEPT
    ledger.take(Release(RUN))
    assert not ledger._worked


def test_it_knows_of_which_runs_anything_is_kept() -> None:
    ledger = Ledger()
    ledger.answer(Loaded(RunId("a"), W, PolicyVersion(PolicyName("p"), 1), "digest"))
    ledger.answer(WorkerFailed(RunId("b"), OpId("op"), W, "no"))
    assert ledger.runs() == ("a", "b")
    for run in ("a", "b"):
        ledger.take(Release(RunId(run)))
    assert ledger.runs() == ()
