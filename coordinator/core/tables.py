"""The turn gate of one table (one running episode): which seats are admitted, where their requests are, and when the turn closes.

A turn admits seats; every other seat is pending until it closes. It closes once, when each admitted seat has acted or forfeited, and all
results leave together in the order of admission, so that nothing depends on who was first.

Invariants (checked by `violations`):
- T1 turn numbers rise; a turn is opened only when the one before has closed (I3);
- T2 an open turn lacks at least one result (it never stays open when everybody has acted);
- T3 results belong to admitted seats, at most one each, and carry exactly the version that was asked for (I9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from tinker.protocol.making import maker
from tinker.protocol.to_coordinator import Generated, OpenTurn, SeatRequest
from tinker.protocol.to_host import SeatResult, TurnClosed
from tinker.protocol.values import EpisodeId, Finish, PackedFloats, PackedIds, RunId, SeatName, TurnId, WorkerName

ATTEMPTS = 3  # workers that may fail one request before its seat forfeits


class GateError(Exception):
    """The gate refuses; the message says why. The table has not changed."""


@dataclass(frozen=True, slots=True)
class Admission:
    """One admitted seat: its request, the worker that has it (None: nowhere yet), those that failed, its result once it is in."""

    request: SeatRequest
    worker: WorkerName | None = None
    failed: tuple[WorkerName, ...] = ()
    result: SeatResult | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    number: int
    deadline: float
    seats: tuple[Admission, ...]

    def admission(self, seat: SeatName) -> Admission | None:
        for each in self.seats:
            if each.request.seat == seat:
                return each
        return None

    @property
    def waiting(self) -> tuple[Admission, ...]:
        return tuple([each for each in self.seats if each.result is None])


@dataclass(frozen=True, slots=True)
class Table:
    """`closed`: the last closed turn with its results, kept so that a repeated `OpenTurn` gets them again."""

    run: RunId
    episode: EpisodeId
    turn: Turn | None = None
    closed: TurnClosed | None = None
    sticky: Mapping[SeatName, WorkerName] = field(default_factory=dict)
    attempt: int = 0

    def id(self, number: int) -> TurnId:
        return TurnId(self.run, self.episode, number, self.attempt)


_table, _turn, _admission, _result = maker(Table), maker(Turn), maker(Admission), maker(SeatResult)


def open_turn(table: Table, message: OpenTurn, now: float) -> Table:
    """Admit the seats of the message. A repeated message changes nothing; GateError if the turn may not open."""
    number = message.turn.number
    if table.turn is not None and table.turn.number == number:
        if tuple(each.request for each in table.turn.seats) != message.requests:
            raise GateError(f"turn {number} is open with other requests; a turn's requests never change")
        return table
    if table.closed is not None and number <= table.closed.turn.number:
        if number == table.closed.turn.number:
            return table
        raise GateError(f"turn {number} is over; the last closed turn is {table.closed.turn.number}")
    if table.turn is not None:
        waiting = ", ".join(each.request.seat for each in table.turn.waiting)
        raise GateError(
            f"turn {table.turn.number} is still open (waiting for {waiting}); turn {number} must wait until it closes"
        )
    seats = [request.seat for request in message.requests]
    if not seats or len(set(seats)) != len(seats):
        raise GateError(f"turn {number} admits {seats or 'no seat'}; each turn admits at least one seat, none twice")
    if not 0 < message.deadline < inf:
        raise GateError(
            f"turn {number} has the deadline {message.deadline}; it must be a positive, finite number of seconds"
        )
    admissions = tuple([_admission(request) for request in message.requests])
    turn = _turn(number, now + message.deadline, admissions)
    return _table(table.run, table.episode, turn, table.closed, table.sticky, table.attempt)


def place(table: Table, workers: Mapping[SeatName, WorkerName]) -> Table:
    """The requests of these seats went to these workers; their later requests go there too."""
    turn, sticky = table.turn, table.sticky
    if turn is None or not workers:
        return table
    seats = [
        _admission(each.request, workers[seat], each.failed, each.result)
        if (seat := each.request.seat) in workers
        else each
        for each in turn.seats
    ]
    for seat, worker in workers.items():
        if sticky.get(seat) != worker:
            sticky = {**sticky, seat: worker}
    turn = _turn(turn.number, turn.deadline, tuple(seats))
    return _table(table.run, table.episode, turn, table.closed, sticky, table.attempt)


def act(table: Table, answer: Generated) -> tuple[Table, TurnClosed | None]:
    """A worker's answer is in; the closed turn if it was the last. GateError for an answer nobody waits for, or of another version."""
    if table.turn is None or answer.turn.number != table.turn.number or answer.turn.attempt != table.attempt:
        raise GateError(f"late answer of {answer.worker} for turn {answer.turn.number}")
    admission = table.turn.admission(answer.seat)
    if admission is None or admission.result is not None or admission.worker != answer.worker:
        raise GateError(f"{answer.worker} answers for {answer.seat}, whose request it does not hold")
    asked, version = admission.request.policy, answer.version
    if (version.version, version.policy) != (asked.version, asked.policy):
        raise GateError(f"{answer.worker} answered {answer.seat} with {version}, asked was {asked}")
    if len(answer.ids) != len(answer.logprobs) or len(answer.ids) % 4:
        raise GateError(
            f"{answer.worker} answered {len(answer.ids)} bytes of ids with {len(answer.logprobs)} of logprobs; "
            f"both need 4 for each token"
        )
    result = _result(
        answer.seat,
        answer.worker,
        answer.ids,
        answer.logprobs,
        answer.finish,
        version,
        answer.busy,
        "",
        answer.engine,
    )
    acted = _admission(admission.request, admission.worker, admission.failed, result)
    return _close(_with(table, table.turn, admission, acted))


def fail(
    table: Table, turn: TurnId, seat: SeatName, worker: WorkerName, reason: str
) -> tuple[Table, TurnClosed | None]:
    """The worker could not answer: the request is nowhere again, or the seat forfeits when its attempts are spent."""
    admission = table.turn.admission(seat) if table.turn and table.id(table.turn.number) == turn else None
    if admission is None or admission.result is not None or admission.worker != worker:
        return table, None
    failed = (*admission.failed, worker)
    if len(failed) < ATTEMPTS:
        return _amend(table, seat, lambda each: replace(each, worker=None, failed=failed)), None
    return _close(_forfeit(table, seat, f"{len(failed)} attempts failed, the last one ({worker}) with: {reason}"))


def lose(table: Table, worker: WorkerName) -> Table:
    """The worker is gone: what it held is nowhere again (it is no fault of the request), and it is nobody's sticky worker."""
    sticky = {seat: name for seat, name in table.sticky.items() if name != worker}
    after = replace(table, sticky=sticky)
    for admission in table.turn.waiting if table.turn else ():
        if admission.worker == worker:
            after = _amend(after, admission.request.seat, lambda each: replace(each, worker=None))
    return after


def expire(table: Table, now: float) -> tuple[Table, TurnClosed | None, tuple[Admission, ...]]:
    """After its deadline an open turn closes: who has not acted forfeits. Also returns what workers may stop working on."""
    if table.turn is None or now < table.turn.deadline:
        return table, None, ()
    waiting = table.turn.waiting
    after = table
    for admission in waiting:
        where = f"at worker {admission.worker}" if admission.worker else "no worker serves its version"
        after = _forfeit(after, admission.request.seat, f"no answer by the turn's deadline ({where})")
    after, closed = _close(after)
    return after, closed, tuple(each for each in waiting if each.worker)


def _amend(table: Table, seat: SeatName, change: Callable[[Admission], Admission]) -> Table:
    assert table.turn is not None
    admission = table.turn.admission(seat)
    return table if admission is None else _with(table, table.turn, admission, change(admission))


def _with(table: Table, turn: Turn, before: Admission, after: Admission) -> Table:
    """Every answer comes through here, so the values are built by hand: `replace` takes five times as long."""
    seats = tuple([after if each is before else each for each in turn.seats])
    turn = _turn(turn.number, turn.deadline, seats)
    return _table(table.run, table.episode, turn, table.closed, table.sticky, table.attempt)


def _forfeit(table: Table, seat: SeatName, reason: str) -> Table:
    def forfeited(each: Admission) -> Admission:
        worker = each.worker or WorkerName("")
        empty = SeatResult(
            seat, worker, PackedIds(b""), PackedFloats(b""), Finish.LENGTH, each.request.policy, forfeit=reason
        )
        return replace(each, result=empty)

    return _amend(table, seat, forfeited)


def _close(table: Table) -> tuple[Table, TurnClosed | None]:
    if table.turn is None:
        return table, None
    results = tuple([each.result for each in table.turn.seats if each.result is not None])
    if len(results) < len(table.turn.seats):
        return table, None
    closed = TurnClosed(table.id(table.turn.number), results)
    return _table(table.run, table.episode, None, closed, table.sticky, table.attempt), closed


def violations(table: Table) -> list[str]:
    found = []
    if table.turn is not None:
        if table.closed is not None and table.turn.number <= table.closed.turn.number:
            found.append("T1")
        if not table.turn.waiting:
            found.append("T2")
        results = [each for each in table.turn.seats if each.result is not None]
        if any(each.result is not None and each.result.version != each.request.policy for each in results):
            found.append("T3")
    return found
