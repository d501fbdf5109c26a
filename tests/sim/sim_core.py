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
from tinker.protocol.to_host import Missing, Opened, TurnClosed, TurnRefused
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import AgentName, Edge, PeerName, Phase, PolicyVersion, SeatName, TurnId


class WatchedCore(Coordinator):
    """A coordinator that tells its witness what its state may not be."""

    witness: Witness
    awake = False  # while the journal is folded nobody looks
    answers: dict[tuple[TurnId, SeatName], set[bytes]]  # what workers said, by what they were asked for

    def join(self, hello: said.Hello, now: float) -> Any:
        return self.watch(super().join(hello, now))

    def step(self, peer: PeerName, message: said.ToCoordinator, now: float) -> Any:
        if not self.awake:
            return super().step(peer, message, now)
        if isinstance(message, said.Generated):
            self.answers.setdefault((message.turn, message.seat), set()).add(message.ids)
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
        self.watch_arrivals(sends)
        for to, message in sends:
            if isinstance(message, Generate) and to not in self.roster.peers:
                witness.broken.append(
                    f"V2 {message.worker} is asked, and {to} has not said since the restart what it holds"
                )
            if isinstance(message, TurnClosed):
                self.watch_results(message)
        if len(self.turns.tables) > sum(len(run.rounds.unaccounted) for run in self.runs.values()):
            witness.broken.append("C4.7 more tables than running episodes")
        return sends

    def watch_results(self, message: TurnClosed) -> None:
        for each in message.results:
            if not each.forfeit and each.ids not in self.answers.get((message.turn, each.seat), ()):
                self.witness.broken.append(f"I3 {each.seat} gets an answer in {message.turn} that was for another turn")

    def watch_arrivals(self, sends: Any) -> None:
        """Whoever is counted at a barrier has a version that every rollout worker in service at that moment has loaded. (One that joins
        later is not waited for; it gets no request for the version before it has loaded it.)"""
        for run in self.runs.values():
            rounds = run.rounds
            if rounds.of_agents:
                here = {AgentName(name): rounds.versions[AgentName(name)] for name, _ in rounds.barrier.arrived}
                self.watch_counted(run, rounds.at, here)
        for message in [each for _, each in sends if isinstance(each, Opened) and each.run in self.runs]:
            if message.edge == Edge.START or message.phase == Phase.UPDATE:
                run = self.runs[message.run]
                numbers = dict(zip((each.name for each in run.spec.agents), message.numbers, strict=True))
                here = {AgentName(name): numbers[AgentName(name)] for name in message.members}
                self.watch_counted(run, (message.round, message.phase, message.edge), here)

    def watch_counted(self, run: Run, at: Any, here: dict[AgentName, int]) -> None:
        account = self.witness.runs[run.spec.run]
        for name, number in here.items():
            if (at, name) in account.counted:
                continue
            account.counted.add((at, name))
            version = PolicyVersion(account.policy(name), number)
            missing = [each for each in sorted(run.versions.workers) if (each, version) not in account.loaded]
            if missing:
                self.witness.broken.append(f"I1 {name} is counted at {at}, {missing} never loaded {version}")


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
