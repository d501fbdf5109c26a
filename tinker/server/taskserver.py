"""The task server: joins a coordinator, offers its pools, and hands every message to the worker it is for.

Workers are supervised actors that share one engine, so one copy of the base model. A worker whose restarts are spent is reported lost; the
server itself goes on with the rest. Bundles (batches in, adapters out) travel over a data connection of their own.

Told to drain, it begins nothing more and finishes what it has begun. What comes meanwhile is left unanswered: the good-bye that follows
makes the coordinator give it to others, whereas a refusal could cost a seat its turn.

A coordinator that restarted, or gave us up, does not know us: we say Hello again, under a new incarnation, with what our workers hold. It
asks again for what it needs, and hears what was answered before (`tinker.server.ledger`). One of a lower epoch is old, and not heard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup

from tinker.engines.engine import Engine, Files
from tinker.pools.commits import Commits, MemoryCommits
from tinker.pools.holding import Holding
from tinker.pools.played import played_bundles
from tinker.pools.rollout import RolloutWorker
from tinker.pools.update import OperationWorker, version_bundle
from tinker.protocol import ToAny, ToTaskserver
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import (
    Bye,
    GenerateFailed,
    Heartbeat,
    Hello,
    LoadFailed,
    WorkerFailed,
    WorkerLost,
    WorkerOffer,
)
from tinker.protocol.to_taskserver import Cancel, Discard, Forget, Generate, Load, Release, Unload, Work
from tinker.protocol.values import BlobRef, PeerName, PoolKind, Role, WorkerName
from tinker.runtime.actor import Actor, ActorDead, ActorRef, ActorSystem, MailboxFull
from tinker.runtime.bulk import BulkClient, BulkServer, BundleStore
from tinker.runtime.clock import LATE, Clock
from tinker.runtime.codec import decode, encode
from tinker.runtime.pauses import Pauses
from tinker.runtime.supervision import Restart
from tinker.runtime.transport import Connection, PeerSlow, Unauthorized
from tinker.server.ledger import Ledger
from tinker.server.status import PoolStatus, TaskServerStatus

Received = ToTaskserver | ToAny
MAILBOX = 4096  # requests that wait for one worker; more is refused by the mailbox and reported as failed
PATIENCE = 60.0  # seconds a coordinator may be silent before we give up
AGAIN = 2.0  # seconds between attempts to be heard by a silent one
GRACE = 3.0  # seconds for the last messages when leaving
DRAIN = 10.0  # seconds to finish what has begun when we stop
MOMENT = 0.05  # seconds between looks whether it is finished
log = structlog.get_logger("taskserver")


class TaskServerError(Exception):
    """This task server cannot go on; the message says what to do."""


class CoordinatorSilent(TaskServerError):
    """The coordinator was not heard for longer than our patience."""


class NotWelcome(TaskServerError):
    """The coordinator refused this task server."""


@dataclass(frozen=True, slots=True)
class Pool:
    """`workers` workers of one kind; each serves `capacity` requests at once."""

    kind: PoolKind
    workers: int = 1
    capacity: int = 1


DEFAULT_POOLS = (Pool(PoolKind.ROLLOUT, 1, 256), Pool(PoolKind.FORWARD), Pool(PoolKind.UPDATE))


@dataclass(slots=True)
class TaskServer:
    """Everything one task server needs; `serve` runs until it has drained, the coordinator is lost or the task is cancelled. `grace`:
    seconds to drain. `commits`: what its update workers have committed (by default it ends with the process)."""

    name: PeerName
    engine: Engine
    tokenizer: bytes
    connection: Connection
    store: BundleStore
    data: BulkServer
    bulk: BulkClient
    clock: Clock
    pid: int
    pools: tuple[Pool, ...] = DEFAULT_POOLS
    on_joined: Callable[[], None] = lambda: None
    grace: float = DRAIN
    patience: float = PATIENCE
    commits: Commits = field(default_factory=MemoryCommits)
    _incarnation: int = 0
    _epoch: int = 0
    _fenced: bool = False
    _lease: float = 15.0
    _member: bool = False
    _heard: float = 0.0
    _workers: dict[WorkerName, ActorRef[Any, Any]] = field(default_factory=dict)
    _kinds: dict[WorkerName, PoolKind] = field(default_factory=dict)
    _spawned: dict[WorkerName, ActorRef[Any, Any]] = field(default_factory=dict)
    _failure: TaskServerError | Unauthorized | None = None
    _ledger: Ledger = field(default_factory=Ledger)
    _draining: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self) -> None:
        """CoordinatorSilent, NotWelcome or Unauthorized when there is nobody to serve. The engine must have been entered."""
        self._heard = self.clock.now()
        async with anyio.create_task_group() as tasks, ActorSystem(clock=self.clock, on_failure=_log_failure) as system:
            for offer in self._offers():
                self._spawn(system, offer, tasks)
            self._send(self._hello())
            tasks.start_soon(self.data.serve, name="data connection")
            tasks.start_soon(self._keep_lease, tasks.cancel_scope, name="keep lease")
            tasks.start_soon(self._finish, tasks.cancel_scope, name="drain")
            try:
                await self._read()
            except (TaskServerError, Unauthorized) as error:  # raised below: what leaves a cancelled group is lost
                self._failure = error
            finally:
                tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Begin nothing more; `serve` ends when everything begun is finished, or the grace time is over."""
        self._draining.set()

    def status(self) -> TaskServerStatus:
        """What it is doing now."""
        draining = "draining: it was told to stop" if self._draining.is_set() else ""
        return TaskServerStatus(
            draining or ("" if self._member else "the coordinator has not said welcome (yet)"),
            tuple(map(self._pool_status, self.pools)),
            len({version for _, _, version in self._ledger.holding}),
            self._ledger.ended,
            self.data.moved + self.bulk.moved,
            {name: worker.counts.restarts for name, worker in self._spawned.items()},
        )

    def _pool_status(self, pool: Pool) -> PoolStatus:
        living = {name: worker for name, worker in self._workers.items() if self._kinds[name] == pool.kind}
        return PoolStatus(
            pool.kind,
            len(living),
            len(living) * pool.capacity,
            sum(job[0] in living for job in self._ledger.begun),
            sum(worker.waiting for worker in living.values()),
        )

    async def _finish(self, serving: anyio.CancelScope) -> None:
        await self._draining.wait()
        log.info("draining", grace=self.grace, begun=len(self._ledger.begun))
        until = self.clock.now() + self.grace
        while self._ledger.begun and self.clock.now() < until:
            await self.clock.sleep_until(min(until, self.clock.now() + MOMENT))
        if self._ledger.begun:
            log.warning("not finished", jobs=len(self._ledger.begun))
        serving.cancel()

    async def leave(self, reason: str) -> None:
        """Say good-bye and close the connection."""
        self._send(Bye(reason))
        await self.connection.aclose(GRACE)

    def _offers(self) -> tuple[WorkerOffer, ...]:
        return tuple(
            WorkerOffer(WorkerName(f"{self.name}/{pool.kind}-{n}"), pool.kind, self.engine.name, pool.capacity)
            for pool in self.pools
            for n in range(pool.workers)
        )

    def _hello(self) -> Hello:
        return Hello(
            Role.TASKSERVER,
            self.name,
            self.store.machine,
            self.pid,
            workers=tuple(offer for offer in self._offers() if offer.name in self._workers),
            model=self.engine.card,
            data=self.store.endpoint,
            tokenizer=self.tokenizer,
            incarnation=self._incarnation,
            holding=self._ledger.held(),
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._ledger.held(), self._ledger.runs())

    def _spawn(self, system: ActorSystem, offer: WorkerOffer, tasks: TaskGroup) -> None:
        def rollout() -> Actor[Any, Any]:
            return RolloutWorker(offer.capacity, self.engine, self._send, self._fetch, tasks)

        def operations() -> Actor[Any, Any]:
            holding = Holding(self.engine, self.commits, self.clock)
            return OperationWorker(self.engine, self._send, self._fetch, self.store, holding, tasks)

        factory = rollout if offer.kind == PoolKind.ROLLOUT else operations
        worker = system.spawn(offer.name, factory, mailbox=MAILBOX, restart=Restart(times=3, within=60.0))
        self._workers[offer.name] = self._spawned[offer.name] = worker
        self._kinds[offer.name] = offer.kind
        tasks.start_soon(self._report_death, offer.name, worker, name=f"watch {offer.name}")

    async def _report_death(self, name: WorkerName, worker: ActorRef[Any, Any]) -> None:
        reason = str(await worker.dead())
        log.error("worker lost", worker=name, reason=reason)
        self._workers.pop(name, None)
        self._ledger.lose(name)
        self._send(WorkerLost(name, reason))

    async def _read(self) -> None:
        while True:
            for data in await self.connection.receive_many():
                self._take(decode(data, Received))

    def _take(self, message: Received) -> None:
        if isinstance(message, Welcome):
            self._fenced = message.epoch < self._epoch
        if self._fenced:
            log.warning("not heard", why=f"the coordinator was replaced by one of epoch {self._epoch}")
            if isinstance(message, Refused) and message.stranger:
                self._refused(message)  # perhaps it is not the old one: Hello, and whoever says Welcome says its epoch
            return
        self._heard = self.clock.now()
        match message:
            case Welcome():
                if not self._member:
                    log.info("welcome", coordinator=message.coordinator, epoch=message.epoch)
                self._member, self._lease, self._epoch = True, message.lease, message.epoch
                self.on_joined()
            case Refused():
                self._refused(message)
            case Draining():
                log.info("coordinator drains", reason=message.reason)
            case Forget() | Release():
                self._ledger.take(message)
                for name, worker in tuple(self._workers.items()):
                    if isinstance(message, Release) or self._kinds[name] == PoolKind.ROLLOUT:
                        self._free(name, worker, message)
                if isinstance(message, Release):
                    self.store.remove_beginning(f"{message.run}=")
            case Discard():
                self.store.remove_beginning(played_bundles(message.run, message.round, message.phase))
            case _:
                self._hand_over(message)

    def _refused(self, message: Refused) -> None:
        """A coordinator that has restarted, or gave us up, knows us no longer: we join again."""
        log.warning("refused", what=message.what, reason=message.reason)
        if message.stranger:
            if self._member:
                self._member = False
                self._incarnation += 1
                self._send(self._hello())
        elif message.what == "Hello":
            raise NotWelcome(f"the coordinator refused task server {self.name!r}: {message.reason}")

    def _free(self, name: WorkerName, worker: ActorRef[Any, Any], message: Forget | Release) -> None:
        try:
            worker.tell(message)
        except (MailboxFull, ActorDead) as error:
            log.warning("not freed", worker=name, message=type(message).__name__, why=str(error))

    def _hand_over(self, message: Any) -> None:
        if isinstance(message, Generate | Load | Work):
            if self._draining.is_set():
                return
            known = self._ledger.begin(message)
            if known is not None:
                if known is not message:
                    self._send(known)
                return
        elif isinstance(message, Cancel | Unload):
            self._ledger.take(message)
        worker = self._workers.get(message.worker)
        try:
            if worker is None:
                self._not_done(message, "there is no such worker here (any more)")
            else:
                worker.tell(message)
        except (MailboxFull, ActorDead) as error:
            self._not_done(message, str(error))
        if isinstance(message, Unload):
            self.store.remove(version_bundle(message.version))

    def _not_done(self, message: Any, why: str) -> None:
        """Whoever waits for this message's outcome hears that there will be none."""
        log.warning("not done", worker=message.worker, message=type(message).__name__, why=why)
        match message:
            case Generate():
                self._send(GenerateFailed(message.turn, message.seat, message.worker, why))
            case Load():
                self._send(LoadFailed(message.run, message.worker, message.version, why))
            case Work():
                self._send(WorkerFailed(message.run, message.op, message.worker, why))

    async def _keep_lease(self, serving: anyio.CancelScope) -> None:
        pauses = Pauses(self.name)
        while self.clock.now() - self._heard <= self.patience:
            silent = not self._member or self.clock.now() - self._heard > self._lease / 2
            due = self.clock.now() + (pauses.about(AGAIN) if silent else self._lease / 3)
            await self.clock.sleep_until(due)
            self._send(self._heartbeat() if self._member else self._hello())
            if self.clock.now() - due > LATE:
                self._heard = self.clock.now()
        self._failure = CoordinatorSilent(
            f"the coordinator was not heard for {self.patience:.0f} s; is it still running?"
        )
        serving.cancel()

    def _send(self, message: Any) -> None:
        """While we are no member answers are only kept: we are asked again. A frame that finds no room is lost like any other."""
        self._ledger.answer(message)
        if self._member or isinstance(message, Hello | Bye):
            with suppress(PeerSlow):
                self.connection.send(encode(message))

    async def _fetch(self, ref: BlobRef) -> Files:
        return await self.bulk.fetch(ref)


def _log_failure(name: str, error: Exception) -> None:
    log.error("worker failed", worker=name, reason=f"{type(error).__name__}: {error}")
