"""What the workers of a task server were asked, what they answered, and what they hold: nothing is done twice, no answer is lost for good.

The coordinator asks again when it, its message or our answer was lost. What is being done goes on; what is done is answered from here. A
failed generation is not kept: asked again, it is tried again. Operations fail once and for all, because they may have had an effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tinker.protocol.to_coordinator import (
    Generated,
    GenerateFailed,
    Held,
    Loaded,
    LoadFailed,
    WorkerDone,
    WorkerFailed,
)
from tinker.protocol.to_taskserver import Cancel, Forget, Generate, Load, Release, Unload, Work
from tinker.protocol.values import PolicyVersion, RunId, TurnId, WorkerName

Job = tuple[WorkerName, Hashable, Hashable]
_OUTCOMES: dict[type, tuple[str, str]] = {
    Generated: ("generate", "done"),
    GenerateFailed: ("generate", "failed"),
    Loaded: ("load", "done"),
    LoadFailed: ("load", "failed"),
    WorkerDone: ("operation", "done"),
    WorkerFailed: ("operation", "failed"),
}
KEPT = 1024  # answers kept, of each kind


@dataclass(slots=True)
class Ledger:
    """`begun`: jobs handed to a worker and not answered yet. `holding`: digests of the versions that workers serve. `ended`: how many jobs
    of which kind ended how, each counted once however often its answer is sent."""

    begun: set[Job] = field(default_factory=set)
    holding: dict[tuple[RunId, WorkerName, PolicyVersion], str] = field(default_factory=dict)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    _generated: dict[Job, Generated] = field(default_factory=dict)
    _worked: dict[Job, WorkerDone | WorkerFailed] = field(default_factory=dict)

    def begin(self, message: Generate | Load | Work) -> Any | None:
        """The job is to be done: None. Else the answer it got before, or `message` itself while it is being done."""
        known: Any = None
        job = job_of(message)
        assert job is not None
        if job in self.begun:
            return message
        match message:
            case Generate():
                known = self._generated.get(job)
            case Work():
                known = self._worked.get(job)
            case Load():
                held = self.holding.get((message.run, message.worker, message.version))
                if held == message.adapter.digest:
                    known = Loaded(message.run, message.worker, message.version, held)
        if known is None:
            self.begun.add(job)
        return known

    def take(self, message: Cancel | Forget | Unload | Release) -> None:
        """What is no longer wanted."""
        match message:
            case Cancel():
                self.begun.discard(_known(message))
            case Unload():
                self.holding.pop((message.run, message.worker, message.version), None)
            case Forget():
                self._drop(message.run, message.episode)
            case Release():
                self.holding = {key: digest for key, digest in self.holding.items() if key[0] != message.run}
                self._drop(message.run, None)

    def answer(self, message: Any) -> None:
        """A worker's answer, whether it can be sent now or not."""
        job = job_of(message)
        if job is None:
            return
        if job in self.begun:
            self.begun.remove(job)
            self.ended[_OUTCOMES[type(message)]] += 1
        match message:
            case Loaded():
                self.holding[message.run, message.worker, message.version] = message.digest
            case Generated():
                self._generated[job] = message
                if len(self._generated) > KEPT:
                    del self._generated[next(iter(self._generated))]
            case WorkerDone() | WorkerFailed():
                self._worked[job] = message
                if len(self._worked) > KEPT:
                    del self._worked[next(iter(self._worked))]

    def lose(self, worker: WorkerName) -> None:
        """The worker is dead: it answers nothing and holds nothing."""
        lost = {job for job in self.begun if job[0] == worker}
        self.begun -= lost
        self.ended.update((_kind(job), "lost") for job in lost)
        self.holding = {key: digest for key, digest in self.holding.items() if key[1] != worker}

    def held(self) -> tuple[Held, ...]:
        return tuple(Held(*key, digest) for key, digest in self.holding.items())

    def runs(self) -> tuple[RunId, ...]:
        """Those of which anything is kept here."""
        kept = {key[0] for key in self.holding} | {each.run for each in self._worked.values()}
        return tuple(sorted(kept | {each.turn.run for each in self._generated.values()}))

    def _drop(self, run: RunId, episode: object) -> None:
        """Answers of an episode (None: of every one, and of operations) that nobody will ask for again."""
        over = [
            job
            for job, each in self._generated.items()
            if each.turn.run == run and episode in (None, each.turn.episode)
        ]
        for job in over:
            del self._generated[job]
        if episode is None:
            self._worked = {job: each for job, each in self._worked.items() if each.run != run}


def job_of(message: Any) -> Job | None:
    """What identifies the piece of work that this message begins, answers or cancels."""
    match message:
        case Generate() | Generated() | GenerateFailed() | Cancel():
            return message.worker, message.turn, message.seat
        case Load() | Loaded() | LoadFailed():
            return message.worker, message.run, message.version
        case Work() | WorkerDone() | WorkerFailed():
            return message.worker, message.run, message.op
    return None


def _kind(job: Job) -> str:
    """By what identifies it beside its worker: a seat of a turn, a run's version, a run's operation."""
    if isinstance(job[1], TurnId):
        return "generate"
    return "load" if isinstance(job[2], PolicyVersion) else "operation"


def _known(message: Any) -> Job:
    job = job_of(message)
    assert job is not None
    return job
