"""The turns of every running episode: their tables, where each request is, and how many requests each worker has in flight.

Invariants (checked by `violations`): those of each table, and
- U1 `in_flight` counts exactly the requests that are placed at a worker and not answered yet;
- U2 no table outlives its episode;
- U3 no request waits for a worker while one that can be reached serves its version (the gate has no lost wake-up);
- U4 a table is of the attempt that its episode's group is dealt under.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.core import tables as gate
from coordinator.core.routing import choose
from coordinator.core.run import Run, Sends
from coordinator.core.tables import Admission, GateError, Table
from tinker.protocol.making import maker
from tinker.protocol.to_coordinator import Generated, GenerateFailed, OpenTurn, SeatRequest
from tinker.protocol.to_host import TurnClosed, TurnRefused
from tinker.protocol.to_taskserver import Cancel, Forget, Generate
from tinker.protocol.values import EpisodeId, PeerName, RunId, SeatName, TurnId, WorkerName

Key = tuple[RunId, EpisodeId]


@dataclass(slots=True)
class Turns:
    """Mutates itself but is otherwise pure. `counts`: totals and refusals by name (the coordinator's own). `cut`: workers that cannot be
    reached; what they hold stays theirs, and they get nothing new."""

    counts: Counter[str]
    tables: dict[Key, Table] = field(default_factory=dict)
    in_flight: Counter[WorkerName] = field(default_factory=Counter)
    cut: frozenset[WorkerName] = frozenset()

    def open(self, run: Run, peer: PeerName, message: OpenTurn, now: float) -> Sends:
        """Admit the seats and send their requests; a repeated message gets the stored answer; else `TurnRefused`."""
        episode = message.turn.episode
        key = (run.spec.run, episode)
        table = self.tables.get(key) or Table(run.spec.run, episode, attempt=message.turn.attempt)
        fenced = run.may_play(peer, message.turn)
        refusal = fenced or next(filter(None, (run.admits(episode, each.policy) for each in message.requests)), "")
        try:
            after = table if refusal else gate.open_turn(table, message, now)
        except GateError as error:
            refusal = str(error)
        if refusal:
            self.counts["refused OpenTurn"] += 1
            return [(peer, TurnRefused(message.turn, refusal, bool(fenced)))]
        if after is table:  # a repeated message: the stored answer, or the requests again if the turn is open
            self.counts["repeated OpenTurn"] += 1
            stored = table.closed
            closed = stored is not None and stored.turn == message.turn
            return [(peer, stored)] if closed else self._ask_again(run, table, now)
        self.counts["turns"] += 1
        return self._place(run, key, after, now)

    def knows(self, turn: TurnId) -> bool:
        """Whether this turn is open, or the last one that closed at its table."""
        table = self.tables.get((turn.run, turn.episode))
        if table is None:
            return False
        open_now = table.turn is not None and table.turn.number == turn.number
        return open_now or (table.closed is not None and table.closed.turn == turn)

    def acted(self, run: Run, answer: Generated, now: float) -> Sends:
        """A worker's answer. One that nobody waits for changes nothing; a wrong one counts as a failure of its worker."""
        key = (run.spec.run, answer.turn.episode)
        table = self.tables.get(key)
        try:
            if table is None:
                raise GateError(f"episode {answer.turn.episode} is over")
            after, closed = gate.act(table, answer)
        except GateError as error:
            self.counts["refused answers"] += 1
            return self.failed(run, GenerateFailed(answer.turn, answer.seat, answer.worker, str(error)), now)
        self._answered(answer.worker)
        return self._store(run, key, after, closed)

    def failed(self, run: Run, message: GenerateFailed, now: float) -> Sends:
        """A worker could not answer: another one is asked, or the seat forfeits."""
        key = (run.spec.run, message.turn.episode)
        table = self.tables.get(key)
        if table is None:
            return []
        after, closed = gate.fail(table, message.turn, message.seat, message.worker, message.reason)
        if after is table:
            return []
        self.counts["failed requests"] += 1
        self._answered(message.worker)
        return ([(run.dealing.holder(key[1])[0], closed)] if closed else []) + self._place(run, key, after, now)

    def clear(self, run: Run, episode: EpisodeId) -> Sends:
        """The episode is over: nobody waits for its requests, its caches may go."""
        table = self.tables.pop((run.spec.run, episode), None)
        if table is None:
            return []
        sends: Sends = []
        if table.turn is not None:
            for admission in table.turn.waiting:
                sends += self._cancel(run, table, table.turn.number, admission)
        holders = {run.owners[worker] for worker in table.sticky.values() if worker in run.owners}
        return sends + [(owner, Forget(table.run, table.episode)) for owner in sorted(holders)]

    def clear_run(self, run: Run) -> Sends:
        return [send for key in self._of(run) for send in self.clear(run, key[1])]

    def withdraw(self, run: Run, worker: WorkerName) -> Sends:
        """The worker serves this run no longer: what it held is nowhere again (call `route` afterwards)."""
        sends: Sends = []
        for key in self._of(run):
            table = self.tables[key]
            for admission in table.turn.waiting if table.turn else ():
                if admission.worker == worker and table.turn is not None:
                    sends += self._cancel(run, table, table.turn.number, admission)
            self.tables[key] = gate.lose(table, worker)
        return sends

    def route(self, run: Run, now: float) -> Sends:
        """Send every request of the run that is nowhere to a worker that serves its version."""
        return [send for key in self._of(run) for send in self._place(run, key, self.tables[key], now)]

    def ask_again(self, run: Run, owner: PeerName, now: float) -> Sends:
        """This task server is back: the requests that are placed there, or their answers, may have been lost."""
        sends = [send for key in self._of(run) for send in self._ask_again(run, self.tables[key], now)]
        return [send for send in sends if send[0] == owner]

    def expire(self, runs: Mapping[RunId, Run], now: float) -> Sends:
        """Close the turns whose deadline has passed."""
        sends: Sends = []
        for key, table in tuple(self.tables.items()):
            after, closed, given_up = gate.expire(table, now)
            if closed is None:
                continue
            self.counts["turns past their deadline"] += 1
            for admission in given_up:
                sends += self._cancel(runs[key[0]], table, closed.turn.number, admission)
            sends += self._store(runs[key[0]], key, after, closed)
        return sends

    def _place(self, run: Run, key: Key, table: Table, now: float) -> Sends:
        """Store the table, and send those of its requests that are nowhere."""
        turn = table.turn
        if turn is None:
            self.tables[key] = table
            return []
        left, at = max(0.0, turn.deadline - now), table.id(turn.number)
        sends: Sends = []
        placed: dict[SeatName, WorkerName] = {}
        for each in turn.seats:
            if each.worker is not None or each.result is not None:
                continue
            request = each.request
            serving = run.versions.serving(request.policy)
            if self.cut:
                serving -= self.cut
            if each.failed:
                serving = serving.difference(each.failed) or serving
            worker = choose(serving, table.sticky.get(request.seat), self.in_flight)
            if worker is None:
                continue
            self.in_flight[worker] += 1
            placed[request.seat] = worker
            sends.append((run.owners[worker], _generate(at, request, worker, left)))
        self.tables[key] = gate.place(table, placed)
        return sends

    def _ask_again(self, run: Run, table: Table, now: float) -> Sends:
        """The requests that are placed and not answered: they, or their answers, may have been lost on the way."""
        if table.turn is None:
            return []
        turn, left = table.id(table.turn.number), max(0.0, table.turn.deadline - now)
        return [
            (run.owners[each.worker], _generate(turn, each.request, each.worker, left))
            for each in table.turn.waiting
            if each.worker is not None and each.worker in run.owners
        ]

    def _of(self, run: Run) -> list[Key]:
        return [key for key in self.tables if key[0] == run.spec.run]

    def _store(self, run: Run, key: Key, table: Table, closed: TurnClosed | None) -> Sends:
        self.tables[key] = table
        return [(run.dealing.holder(key[1])[0], closed)] if closed is not None else []

    def _answered(self, worker: WorkerName) -> None:
        self.in_flight[worker] -= 1

    def _cancel(self, run: Run, table: Table, number: int, admission: Admission) -> Sends:
        """Tell the worker, if there is one and it still serves the run, that nobody waits for this answer."""
        if admission.worker is None:
            return []
        self._answered(admission.worker)
        owner = run.owners.get(admission.worker)
        cancel = Cancel(table.id(number), admission.request.seat, admission.worker)
        return [(owner, cancel)] if owner is not None else []

    def violations(self, runs: Mapping[RunId, Run]) -> list[str]:
        found = []
        for (run_id, episode), table in self.tables.items():
            found += gate.violations(table)
            if run_id not in runs or episode not in runs[run_id].rounds.unaccounted:
                found.append("U2 a table outlives its episode")
                continue
            if runs[run_id].dealing.holder(episode)[1] != table.attempt:
                found.append("U4 a table of a host that was lost")
            nowhere = [each.request.policy for each in table.turn.waiting if each.worker is None] if table.turn else []
            if any(runs[run_id].versions.serving(policy) - self.cut for policy in nowhere):
                found.append("U3 a request waits although a worker serves its version")
        held = Counter(a.worker for t in self.tables.values() if t.turn for a in t.turn.waiting if a.worker)
        if {worker: n for worker, n in self.in_flight.items() if n} != dict(held):
            found.append("U1 requests in flight are miscounted")
        return found


def _generate(turn: TurnId, request: SeatRequest, worker: WorkerName, left: float) -> Generate:
    return _made(turn, request.seat, worker, request.policy, request.prompt, request.sampling, left)


_made = maker(Generate)
