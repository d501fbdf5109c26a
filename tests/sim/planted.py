"""Faults that are planted on purpose, one at a time, to see that the simulation finds them.

`python tests/sim/planted.py [NAME...]` plays seeds from 0 with each of them until one fails (at most LIMIT), and prints the table that
`docs/testing.md` holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

for place in (Path(__file__).parents[2], Path(__file__).parent):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from sim_world import Failure, play  # noqa: E402

from agents.players import policy  # noqa: E402
from coordinator.app import daemon, journal  # noqa: E402
from coordinator.core import barrier, coordinator, order, rounds, run, tables, turns, versions  # noqa: E402
from tinker.client import client, waiters  # noqa: E402
from tinker.pools import update  # noqa: E402
from tinker.protocol.to_taskserver import Work  # noqa: E402
from tinker.protocol.values import PolicyVersion  # noqa: E402
from tinker.runtime import journal as of_disk  # noqa: E402
from tinker.server import ledger  # noqa: E402

LIMIT = 2_000


@dataclass(frozen=True, slots=True)
class Planted:
    """`what`: the fault in words. `plant`: while it is entered, the fault is there."""

    what: str
    plant: Callable[[], AbstractContextManager[Any]]


PLANTED: dict[str, Planted] = {}


def planted(what: str) -> Callable[[Callable[[], Iterator[None]]], None]:
    def keep(function: Callable[[], Iterator[None]]) -> None:
        PLANTED[function.__name__] = Planted(what, contextmanager(function))

    return keep


@planted("a lost wake-up: an agent that waits for a version is not counted when it is loaded")
def lost_wake_up() -> Iterator[None]:
    def loaded(self: run.Run, message: Any, now: float) -> Any:
        self.versions = versions.acknowledge(self.versions, message.version, message.worker, message.digest)
        return []

    with mock.patch.object(run.Run, "loaded", loaded):
        yield


@planted("a stale generation is accepted: an arrival at an earlier barrier counts at the present one")
def stale_generation() -> Iterator[None]:
    right = rounds.arrive

    def arrive(before: rounds.Rounds, message: Any, ready: Any, now: float) -> Any:
        if before.barrier.members != (rounds.EPISODES,):
            message = replace(message, round=before.round, phase=before.phase, edge=before.edge)
        return right(before, message, ready, now)

    with mock.patch.object(rounds, "arrive", arrive):
        yield


@planted("dedupe off by one: the turn that closed last is opened again when it comes again")
def dedupe_off_by_one() -> Iterator[None]:
    right = tables.open_turn

    def open_turn(table: tables.Table, message: Any, now: float) -> Any:
        if table.turn is None and table.closed is not None and table.closed.turn.number == message.turn.number:
            table = replace(table, closed=None)
        return right(table, message, now)

    with mock.patch.object(tables, "open_turn", open_turn):
        yield


@planted("the lease is checked before the input is drained: a late tick expires members at once")
def lease_before_input() -> Iterator[None]:
    with mock.patch.object(daemon, "LATE", float("inf")):
        yield


@planted("a host that was stopped gives the coordinator up before it has heard what arrived")
def host_gives_up_early() -> Iterator[None]:
    with mock.patch.object(client, "LATE", float("inf")):
        yield


@planted("in_flight leaks: a cancelled request is never taken off its worker")
def in_flight_leak() -> Iterator[None]:
    right = turns.Turns._cancel

    def cancel(self: turns.Turns, a_run: Any, table: Any, number: int, admission: Any) -> Any:
        sends = right(self, a_run, table, number, admission)
        if admission.worker is not None:
            self.in_flight[admission.worker] += 1
        return sends

    with mock.patch.object(turns.Turns, "_cancel", cancel):
        yield


@planted("an answer of another version than the one asked for is accepted")
def other_version() -> Iterator[None]:
    right = tables.act

    def act(table: tables.Table, answer: Any) -> Any:
        admission = table.turn.admission(answer.seat) if table.turn is not None else None
        asked = admission.request.policy if admission is not None else answer.version
        return right(table, replace(answer, version=asked))

    with mock.patch.object(tables, "act", act):
        yield


@planted("a barrier opens early: when one member is still missing")
def barrier_opens_early() -> Iterator[None]:
    right = barrier.arrive

    def arrive(gathered: barrier.Barrier, members: Any, now: float) -> barrier.Barrier:
        after = right(gathered, members, now)
        return replace(after, opened=(len(after.missing) <= 1 and len(after.members) > 1) or after.opened)

    with mock.patch.object(barrier, "arrive", arrive), mock.patch.object(barrier, "violations", lambda gathered: []):
        yield


@planted("the update gate ignores its order: all groups are admitted at once")
def gate_ignores_order() -> Iterator[None]:
    right = order.begin

    def begin(*arguments: Any) -> Any:
        gate, _ = right(*arguments)
        together = order.UpdateOrder((tuple(agent for group in gate.groups for agent in group),))
        return together, together.due

    with mock.patch.object(order, "begin", begin):
        yield


@planted("the client drops what comes before somebody waits for it")
def early_opening_dropped() -> Iterator[None]:
    right = waiters.Waiters.put

    def put(self: waiters.Waiters, key: object, value: Any, *, keep: bool = False) -> None:
        right(self, key, value, keep=False)

    with mock.patch.object(waiters.Waiters, "put", put):
        yield


@planted("a version counts as ready when one worker has loaded it")
def ready_too_early() -> Iterator[None]:
    def ready(self: versions.Versions, version: PolicyVersion) -> bool:
        return bool(self.serving(version))

    with mock.patch.object(versions.Versions, "ready", ready):
        yield


@planted("an episode that ends accounts for another one as well")
def one_too_many_accounted() -> Iterator[None]:
    right = rounds.account

    def account(before: rounds.Rounds, episode: Any, ended: Any, now: float) -> Any:
        others = sorted(before.unaccounted - {episode})
        if others:
            before = replace(before, unaccounted=before.unaccounted - {others[0]})
        return right(before, episode, ended, now)

    with mock.patch.object(rounds, "account", account):
        yield


@planted("a worker does an operation again when it comes again")
def operation_done_twice() -> Iterator[None]:
    right = ledger.Ledger.begin

    def begin(self: ledger.Ledger, message: Any) -> Any:
        known = right(self, message)
        return None if isinstance(message, Work) else known

    async def again(self: update.OperationWorker, message: Any) -> None:
        self._results.clear()
        await receive(self, message)

    receive = update.OperationWorker.receive
    with mock.patch.object(ledger.Ledger, "begin", begin), mock.patch.object(update.OperationWorker, "receive", again):
        yield


@planted("effects leave before the journal is written")
def effect_before_journal() -> Iterator[None]:
    right = daemon.Daemon._flush

    def flush(self: daemon.Daemon) -> None:
        for key, message in self._outgoing:
            self._send_to(key, [message])
        self._outgoing.clear()
        right(self)

    with mock.patch.object(daemon.Daemon, "_flush", flush):
        yield


@planted("replies that did not parse are trained on")
def rejected_trained_on() -> Iterator[None]:
    right = policy.PolicyPlayer.__init__

    def init(self: policy.PolicyPlayer, template: Any, playing: Any, seed: Any) -> None:
        right(self, template, replace(playing, learn_from_forfeits=True), seed)

    with mock.patch.object(policy.PolicyPlayer, "__init__", init):
        yield


@planted("nothing is synced before what it caused leaves")
def nothing_synced() -> Iterator[None]:
    with mock.patch.object(journal, "DURABLE", frozenset()):
        yield


@planted("a new segment of the journal is not synced: after the machine has failed the one before it is there again")
def name_not_synced() -> Iterator[None]:
    with mock.patch.object(of_disk, "_sync_directory", lambda directory: None):
        yield


@planted("a coordinator that restarts keeps its epoch")
def epoch_kept() -> Iterator[None]:
    right = coordinator.Coordinator.restart

    def restart(self: coordinator.Coordinator, *arguments: Any) -> Any:
        before = self.epoch
        sends = right(self, *arguments)
        self.epoch = before
        return sends

    with mock.patch.object(coordinator.Coordinator, "restart", restart):
        yield


@planted("after a restart a worker counts as holding what it held before, whether it has said so or not")
def holdings_not_asked() -> Iterator[None]:
    with mock.patch.object(versions, "restart", lambda before: before):
        yield


@planted("a late answer for an earlier turn of a seat counts for the open turn")
def late_answer_counts() -> Iterator[None]:
    right = tables.act

    def act(table: tables.Table, answer: Any) -> Any:
        return right(table, replace(answer, turn=table.id(table.turn.number)) if table.turn else answer)

    with mock.patch.object(tables, "act", act):
        yield


@planted("a host hears a coordinator of a lower epoch")
def old_coordinator_heard() -> Iterator[None]:
    right = client.Client._welcome

    def welcome(self: client.Client, message: Any) -> None:
        right(self, replace(message, epoch=max(message.epoch, self.epoch)))

    with mock.patch.object(client.Client, "_welcome", welcome):
        yield


def find(name: str, limit: int = LIMIT) -> tuple[int, str] | None:
    """The first seed that finds this fault, and what it says; None: none of the first `limit` does."""
    with PLANTED[name].plant():
        for seed in range(limit):
            try:
                play(seed)
            except Failure as failure:
                return seed, str(failure).splitlines()[0]
    return None


def main(names: list[str]) -> int:
    missed = []
    for name in names or list(PLANTED):
        began = time.monotonic()
        found = find(name)
        if found is None:
            missed.append(name)
        seed, text = found or (-1, "not found")
        print(
            f"| `{name}` | {PLANTED[name].what} | {seed} | {text[:160]} |",
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
