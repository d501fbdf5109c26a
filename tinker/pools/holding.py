"""What an update worker holds of each policy, in step with what is committed.

Before anything is done with a policy, its newest commit is looked at: if it is not ours, another worker has had the policy meanwhile (or we
have restarted), and we go on from there. So an operation is done on the last committed state, whoever committed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from tinker.engines.engine import Engine, EngineError, Files
from tinker.pools.commits import Commits, CommitUnwritable, Superseded
from tinker.protocol.operations import Lost, Result
from tinker.protocol.values import OpId, PolicyName, RunId
from tinker.runtime.clock import Clock
from tinker.runtime.plain import from_text, to_text

RESULTS, LEARNER = "results.json", "learner.bin"
KNOWN = 64  # results that a commit keeps
PAUSE = 2.0  # seconds between attempts to commit while the disk takes nothing
log = structlog.get_logger("taskserver")


class NotHere(EngineError):
    """An operation needs what is not here (any more)."""

    def __init__(self, reason: str, lost: Lost) -> None:
        super().__init__(reason)
        self.lost = lost


@dataclass(frozen=True, slots=True)
class Done:
    """Operations and their results, oldest first."""

    results: Mapping[OpId, Result]


@dataclass(slots=True)
class Held:
    """One policy. `number`: of its newest commit. `done`: results that are committed with it. `gradients`: operations whose gradient has
    accumulated since. `learner`: what the learner remembers with it."""

    run: RunId
    number: int = 0
    done: dict[OpId, Result] = field(default_factory=dict)
    gradients: list[OpId] = field(default_factory=list)
    learner: bytes = b""


class Holding:
    """The policies of one update worker. The engine may have others."""

    def __init__(self, engine: Engine, commits: Commits, clock: Clock) -> None:
        self._engine = engine
        self._commits = commits
        self._clock = clock
        self._held: dict[PolicyName, Held] = {}

    async def find(self, run: RunId, policy: PolicyName) -> Held | None:
        """The policy as it was last committed, whoever did that; None if nobody has committed it."""
        held = self._held.get(policy)
        newest = self._commits.newest(policy)
        if held is not None and held.number == newest:
            return held
        if held is not None:
            log.warning("policy was elsewhere", policy=policy, ours=held.number, newest=newest)
            await self.drop(policy)
        commit = self._commits.read(policy)
        if commit is None:
            return None
        await self._engine.load_state(policy, commit.files)
        known = from_text(commit.files[RESULTS].decode(), Done).results
        held = Held(run, newest, dict(known), learner=commit.files[LEARNER])
        log.info("policy taken over", policy=policy, commit=commit.number, results=len(known))
        await self.commit(policy, held)  # whoever had it cannot commit any more
        self._held[policy] = held
        return held

    def fresh(self, run: RunId, policy: PolicyName) -> Held:
        """A policy that is about to be attached; `commit` makes it held."""
        return Held(run, self._commits.newest(policy))

    async def commit(self, policy: PolicyName, held: Held) -> None:
        """The policy's present state is committed on return, and no gradient is left. NotHere if another worker has committed meanwhile.
        While the disk is full we wait: what has been learned is not given up for that."""
        while len(held.done) > KNOWN:
            del held.done[next(iter(held.done))]
        files = await self._files(policy, held)
        told = ""
        while True:
            try:
                self._commits.write(policy, held.number + 1, files)
                break
            except Superseded as error:
                await self.drop(policy)
                raise NotHere(str(error), Lost.GRADIENT) from error
            except CommitUnwritable as error:
                if str(error) != told:
                    log.error("waiting for the disk", policy=policy, why=str(error))
                told = str(error)
                await self._clock.sleep_until(self._clock.now() + PAUSE)
        held.number += 1
        held.gradients.clear()
        self._held[policy] = held

    async def files(self, policy: PolicyName, held: Held) -> Files:
        """What is committed, as a bundle that `LoadState` takes: the state, and the learner's numbers."""
        return {**await self._engine.save_state(policy), LEARNER: held.learner}

    async def forget_gradient(self, policy: PolicyName, held: Held) -> None:
        """Back to the last commit."""
        commit = self._commits.read(policy)
        if commit is None or commit.number != held.number:
            await self.drop(policy)
            return
        await self._engine.load_state(policy, commit.files)
        held.gradients.clear()

    async def release(self, run: RunId) -> None:
        """The run is over."""
        for policy in [name for name, held in self._held.items() if held.run == run]:
            await self.drop(policy)
        self._commits.forget(run)

    async def drop(self, policy: PolicyName) -> None:
        """Hold it no longer; what is committed stays."""
        self._held.pop(policy, None)
        await self._engine.detach(policy)

    async def _files(self, policy: PolicyName, held: Held) -> Files:
        return {**await self.files(policy, held), RESULTS: to_text(Done(held.done), Done).encode()}
