"""The turn gate of one table."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from core_values import RUN, answer, request, turn, version

from coordinator.core import tables
from coordinator.core.tables import ATTEMPTS, GateError, Table
from tinker.protocol.to_coordinator import Generated
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import BASE, EpisodeId, Phase, SeatName, WorkerName, pack_ids

W1, W2 = WorkerName("w1"), WorkerName("w2")
X, Y = SeatName("x"), SeatName("y")
FIRST = turn(0, request("x", version("a", 0)), request("y", BASE))


def opened() -> Table:
    """Turn 0 is open: x at w1, y at w2."""
    table = tables.open_turn(Table(RUN, EpisodeId(1, Phase.ROLLOUT, 0)), FIRST, 0.0)
    return tables.place(table, {X: W1, Y: W2})


def said_by(worker: WorkerName, seat: SeatName, /, **changes: object) -> Generated:
    asked = FIRST.requests[0] if seat == X else FIRST.requests[1]
    return answer(Generate(FIRST.turn, seat, worker, asked.policy, asked.prompt, asked.sampling, 20.0), **changes)


@pytest.mark.parametrize("last", [X, Y])
def test_a_turn_closes_with_its_last_answer_and_in_the_order_of_admission(last: SeatName) -> None:
    table = opened()
    first = Y if last == X else X
    table, closed = tables.act(table, said_by(W1 if first == X else W2, first))
    assert closed is None and tables.violations(table) == []
    table, closed = tables.act(table, said_by(W1 if last == X else W2, last))
    assert closed is not None and [each.seat for each in closed.results] == ["x", "y"]
    assert table.turn is None and table.closed == closed


@pytest.mark.parametrize(
    "wrong",
    [
        said_by(W2, X),
        said_by(W1, X, seat=SeatName("z")),
        said_by(W1, X, version=version("a", 1)),
        said_by(W1, X, version=BASE),
        said_by(W1, X, turn=replace(FIRST.turn, number=1)),
        said_by(W1, X, logprobs=b""),
        said_by(W1, X, ids=b"123", logprobs=b"123"),
    ],
)
def test_a_wrong_answer_is_refused(wrong: Generated) -> None:
    with pytest.raises(GateError):
        tables.act(opened(), wrong)


def test_an_answer_counts_once() -> None:
    table, _ = tables.act(opened(), said_by(W1, X))
    with pytest.raises(GateError, match="does not hold"):
        tables.act(table, said_by(W1, X, ids=pack_ids([9, 9])))


def test_an_answer_to_a_closed_turn_is_late() -> None:
    table, _ = tables.act(opened(), said_by(W1, X))
    table, _ = tables.act(table, said_by(W2, Y))
    with pytest.raises(GateError, match="late answer"):
        tables.act(table, said_by(W2, Y))


def test_the_next_turn_waits_until_this_one_has_closed() -> None:
    with pytest.raises(GateError, match=r"turn 0 is still open \(waiting for x, y\)"):
        tables.open_turn(opened(), replace(FIRST, turn=replace(FIRST.turn, number=1)), 0.0)


def test_an_old_turn_never_opens_again() -> None:
    table, _, _ = tables.expire(opened(), 20.0)
    table = tables.open_turn(table, replace(FIRST, turn=replace(FIRST.turn, number=1)), 21.0)
    table, _, _ = tables.expire(table, 50.0)
    with pytest.raises(GateError, match="turn 0 is over"):
        tables.open_turn(table, FIRST, 51.0)


def test_opening_the_same_turn_again_changes_nothing_open_or_closed() -> None:
    table = opened()
    assert tables.open_turn(table, FIRST, 5.0) is table
    table, _, _ = tables.expire(table, 20.0)
    assert tables.open_turn(table, FIRST, 25.0) is table


def test_a_turn_never_changes_its_requests() -> None:
    with pytest.raises(GateError, match="never change"):
        tables.open_turn(opened(), replace(FIRST, requests=FIRST.requests[:1]), 5.0)


@pytest.mark.parametrize("requests", [(), (FIRST.requests[0], FIRST.requests[0])])
def test_a_turn_admits_at_least_one_seat_and_none_twice(requests: tuple[object, ...]) -> None:
    with pytest.raises(GateError, match="at least one seat, none twice"):
        tables.open_turn(Table(RUN, FIRST.turn.episode), replace(FIRST, requests=requests), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("deadline", [0.0, -1.0, inf, nan])
def test_every_turn_has_a_deadline(deadline: float) -> None:
    with pytest.raises(GateError, match="positive, finite"):
        tables.open_turn(Table(RUN, FIRST.turn.episode), replace(FIRST, deadline=deadline), 0.0)


def test_a_request_whose_workers_keep_failing_forfeits_and_the_turn_closes() -> None:
    table, _ = tables.act(opened(), said_by(W2, Y))
    for _ in range(ATTEMPTS - 1):
        table, closed = tables.fail(table, FIRST.turn, X, W1, "out of memory")
        assert closed is None
        table = tables.place(table, {X: W1})
    table, closed = tables.fail(table, FIRST.turn, X, W1, "out of memory")
    assert closed is not None and "out of memory" in closed.results[0].forfeit and closed.results[1].ids


def test_the_failure_of_a_worker_that_does_not_hold_the_request_changes_nothing() -> None:
    table = opened()
    assert tables.fail(table, FIRST.turn, X, W2, "late") == (table, None)


def test_a_lost_worker_costs_no_attempt() -> None:
    table = tables.lose(opened(), W1)
    assert table.turn is not None
    assert (table.turn.seats[0].worker, table.turn.seats[0].failed) == (None, ())
    assert table.turn.seats[1].worker == W2 and table.sticky == {Y: W2}


def test_at_its_deadline_who_has_not_acted_forfeits_and_the_others_keep_their_answers() -> None:
    table, _ = tables.act(opened(), said_by(W2, Y))
    assert tables.expire(table, 19.9) == (table, None, ())
    table, closed, given_up = tables.expire(table, 20.0)
    assert closed is not None
    assert [bool(each.forfeit) for each in closed.results] == [True, False]
    assert [each.worker for each in given_up] == [W1] and "at worker w1" in closed.results[0].forfeit


def test_a_forfeit_says_when_nobody_serves_the_version() -> None:
    _, closed, given_up = tables.expire(tables.lose(opened(), W1), 20.0)
    assert closed is not None and "no worker serves its version" in closed.results[0].forfeit
    assert [each.worker for each in given_up] == [W2]
