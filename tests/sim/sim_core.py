"""The coordinator's core under watch: every call is followed by a look at its invariants, its bounds and its counting."""

from __future__ import annotations

from typing import Any

from sim_witness import Witness

from coordinator.core.coordinator import Coordinator
from coordinator.core.rounds import KEPT
from coordinator.core.run import STORED
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
