"""The coordinator's core under watch: every call is followed by a look at its invariants, its bounds and its counting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from operator import is_
from typing import Any
from unittest import mock

from sim_witness import Witness

from coordinator.core.coordinator import Coordinator
from coordinator.core.rounds import KEPT
from coordinator.core.run import STORED, Run
from coordinator.core.turns import Turns
from tinker.protocol import to_coordinator as said
from tinker.protocol.to_any import Refused
from tinker.protocol.to_host import Missing, Opened, TurnRefused
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import Edge, PeerName, Phase, PolicyVersion, WorkerName


class WatchedCore(Coordinator):
    """A coordinator that tells its witness what its state may not be."""

    witness: Witness
    awake = False  # while the journal is folded nobody looks

    def join(self, hello: said.Hello, now: float) -> Any:
        return self.watch(super().join(hello, now))

    def step(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Any:
        if not self.awake:
            return super().step(peer, message, now)
        before = sum(self.counts.values())
        flying = sum(self.turns.in_flight.values())
        sends = super().step(peer, message, now)
        counted = sum(self.counts.values()) > before
        did, broken = self.witness.did, self.witness.broken
        if any(isinstance(each, Refused | TurnRefused) for _, each in sends):
            did["message refused"] += 1
            if not counted:
                broken.append(f"I10 {type(message).__name__} of {peer} was refused and not counted")
        if isinstance(message, said.Generated):
            taken = sum(self.turns.in_flight.values()) < flying
            if not taken and not counted:
                broken.append(f"I10 an answer of {message.worker} was dropped and not counted")
            if counted:
                did["late answer fenced"] += 1
        if isinstance(message, said.GenerateFailed | said.WorkerLost | said.LoadFailed):
            did[f"{type(message).__name__} heard"] += 1
            if any(isinstance(each, Generate) for _, each in sends):
                did["turn re-routed after a loss"] += 1
        return self.watch(sends)

    def lose(self, peer: PeerName, reason: str, now: float) -> Any:
        sends = super().lose(peer, reason, now)
        if self.awake and any(isinstance(each, Generate) for _, each in sends):
            self.witness.did["turn re-routed after a loss"] += 1
        return self.watch(sends)

    def tick(self, now: float) -> Any:
        sends = super().tick(now)
        if self.awake and any(isinstance(each, Missing) for _, each in sends):
            self.witness.did["straggler notice"] += 1
        return self.watch(sends)

    def watch(self, sends: Any) -> Any:
        if not self.awake:
            return sends
        witness = self.witness
        witness.broken += self.violations()
        for run in self.runs.values():
            if run.rounds.held:
                witness.did["barrier held for a loading version"] += 1
            if len(run.outcomes) > STORED or len(run.rounds.openings) > KEPT:
                witness.broken.append(f"C4.7 {run.spec.run} keeps too much")
            self.watch_openings(sends)
        if len(self.turns.tables) > sum(len(run.rounds.unaccounted) for run in self.runs.values()):
            witness.broken.append("C4.7 more tables than running episodes")
        return sends

    def watch_openings(self, sends: Any) -> None:
        """A version with which a barrier opens is loaded by every rollout worker in service."""
        for _, message in sends:
            if not isinstance(message, Opened) or message.run not in self.runs:
                continue
            workers = self.runs[message.run].versions.workers
            account = self.witness.runs.get(message.run)
            at = (message.round, message.phase, message.edge)
            if account is None or at in account.opened:
                continue
            for version in message.versions:
                self.watch_loaded(message, version, workers)

    def watch_loaded(self, message: Opened, version: PolicyVersion, workers: frozenset[WorkerName]) -> None:
        """Those that were in service when it was published: later ones get no request for it before they have loaded it."""
        account = self.witness.runs[message.run]
        if message.edge == Edge.END and message.phase != Phase.UPDATE:
            return
        waited = [worker for worker in sorted(workers) if (worker, version) in account.waited_for]
        missing = [worker for worker in waited if (worker, version) not in account.loaded]
        if missing:
            self.witness.broken.append(f"I1 {message.phase} {message.edge} opens, {missing} never loaded {version}")


@contextmanager
def looked_at_when_changed() -> Iterator[None]:
    """While it is entered, runs and turns are looked at again only if something of them is not what it was when all was well."""

    def of_run(run: Run) -> list[object]:
        return _parts(run)

    def of_turns(turns: Turns, runs: dict[Any, Run]) -> list[object]:
        return [*_parts(turns), *(part for run in runs.values() for part in (run.rounds, run.versions))]

    with (
        mock.patch.object(Run, "violations", _when_changed(Run.violations, of_run)),
        mock.patch.object(Turns, "violations", _when_changed(Turns.violations, of_turns)),
    ):
        yield


def _parts(owner: Any) -> list[object]:
    """Its fields as they are now: frozen values, and what is in containers."""
    parts: list[object] = []
    for name in _fields(type(owner)):
        value = getattr(owner, name)
        if isinstance(value, dict):
            parts += value.keys()
            parts += value.values()
        else:
            parts.append(value)
    return parts


@cache
def _fields(owner: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(owner))


def _when_changed(look: Callable[..., list[str]], state: Callable[..., list[object]]) -> Callable[..., list[str]]:
    seen: dict[int, tuple[object, list[object]]] = {}  # by identity; the owner is kept, so that no other gets its place

    def violations(owner: Any, *arguments: Any) -> list[str]:
        now = state(owner, *arguments)
        before = seen.get(id(owner), (None, None))[1]
        if before is not None and len(before) == len(now) and all(map(is_, before, now)):
            return []
        found = look(owner, *arguments)
        if not found:
            seen[id(owner)] = owner, now
        return found

    return violations
