"""An honest task server as a state machine: what it hears, it answers; it checks that nobody asks it for what it does not hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core_values import answer, blob, version

from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, Measured, Publish, Published, Scored
from tinker.protocol.to_coordinator import Held, Hello
from tinker.protocol.to_taskserver import Generate, Load, Release, Unload, Work
from tinker.protocol.values import BASE, OpId, PolicyVersion, RunId, WorkerName

if TYPE_CHECKING:
    from core_world import World


@dataclass
class Server:
    """`held`: versions a worker serves. `worked`: operations it was asked for, and what it answered."""

    hello: Hello
    rng: random.Random
    held: dict[tuple[RunId, WorkerName], list[PolicyVersion]] = field(default_factory=dict)
    worked: dict[tuple[RunId, OpId], list[object]] = field(default_factory=dict)
    released: list[RunId] = field(default_factory=list)
    digests: dict[tuple[RunId, PolicyVersion], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = [worker.name for worker in self.hello.workers]

    def hear(self, message: object, world: World) -> list[object]:
        faulty = world.chaos and self.rng.random() < 0.06
        if faulty and isinstance(message, Generate | Load | Work):
            world.did[f"faulty {type(message).__name__}"] += 1
        match message:
            case Generate() if message.worker in self.alive:
                return self.generate(message, faulty)
            case Load() if message.worker in self.alive:
                return self.load(message, faulty)
            case Work() if message.worker in self.alive:
                return self.work(message, faulty)
            case Unload():
                held = self.held.get((message.run, message.worker), [])
                if message.version in held:
                    held.remove(message.version)
            case Release():
                self.released.append(message.run)
        return []

    def holding(self) -> tuple[Held, ...]:
        """What it says when it joins again."""
        return tuple(
            Held(run, worker, each, self.digests[run, each])
            for (run, worker), held in self.held.items()
            for each in held
            if worker in self.alive
        )

    def check_asked(self, asked: Generate, world: World) -> None:
        """I1, I3 and I9, when the coordinator asks: an admitted seat of an open turn, in the bound, of a worker that serves it."""
        host = next(host for host in world.hosts.values() if host.spec.run == asked.turn.run)
        assert asked.worker in [worker.name for worker in self.hello.workers], f"{asked.worker} is not here"
        assert 0 <= asked.deadline < 20.001
        ours = [each for each in world.further.values() if each.spec.run == asked.turn.run]
        for player in (host, *ours):
            player.check_asked(asked)
        run = world.core.runs.get(asked.turn.run)  # None: stopped in the same step
        assert run is None or (self.hello.model is not None and self.hello.model.digest == run.model)
        assert run is None or asked.worker not in run.owners or asked.worker in run.versions.serving(asked.policy)

    def generate(self, asked: Generate, faulty: bool) -> list[object]:
        held = self.held.get((asked.turn.run, asked.worker), [])
        assert asked.policy == BASE or asked.policy in held or asked.turn.run in self.released, (
            f"{asked.policy} is not held"
        )
        right = answer(asked)
        if not faulty:
            return [right]
        wrong: list[list[object]] = [
            [],  # it never answers: the deadline will come
            [said.GenerateFailed(asked.turn, asked.seat, asked.worker, "out of memory")],
            [answer(asked, version=version("nobody", 7))],
            [answer(asked, version=version("nobody", 7)), right],
            [answer(asked, logprobs=b"")],
            [answer(asked, seat="nobody"), right],
            [right, right],
        ]
        return self.rng.choice(wrong)

    def load(self, message: Load, faulty: bool) -> list[object]:
        if faulty and self.rng.random() < 0.5:
            return [said.LoadFailed(message.run, message.worker, message.version, "disk full")]
        if faulty:
            return [said.Loaded(message.run, message.worker, message.version, "other weights")]
        held = self.held.setdefault((message.run, message.worker), [])
        if message.version not in held:
            held.append(message.version)
        self.digests[message.run, message.version] = message.adapter.digest
        return [said.Loaded(message.run, message.worker, message.version, message.adapter.digest)]

    def work(self, message: Work, faulty: bool) -> list[object]:
        key = (message.run, message.op)
        if key not in self.worked:
            self.worked[key] = self.outcome(message, faulty)
        return self.worked[key]

    def outcome(self, message: Work, faulty: bool) -> list[object]:
        wrong = said.WorkerDone(message.run, message.op, message.worker, Scored(blob("wrong")))
        if faulty:
            failed = said.WorkerFailed(message.run, message.op, message.worker, "out of memory")
            return [failed if message.op.startswith("score") else self.rng.choice((failed, wrong))]
        match message.operation:
            case Attach():
                number = 0
            case Publish(number):
                pass
            case _ if message.op.startswith("score"):
                return [wrong]  # for a Score it is right
            case _:
                return [said.WorkerDone(message.run, message.op, message.worker, Measured(()))]
        published = PolicyVersion(message.policy, number)
        result = Published(published, blob(f"{message.run} {published} {message.op}"))
        return [said.WorkerDone(message.run, message.op, message.worker, result)]
