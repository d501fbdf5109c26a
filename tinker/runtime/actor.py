"""Actors: objects that own their state and handle one message at a time, from a bounded mailbox, under supervision.

Order: messages from one sender are handled in the order sent. Every `ask` has exactly one outcome: the reply, the exception that handling
it raised, AskTimeout, ActorDead, or MailboxFull. A failure answers its ask, then the actor is built again by its policy; messages that
wait stay in the mailbox. When an actor ends, however that happens, everyone in its mailbox is told, and then its watchers. An ask whose
asker gave up before its turn is not handled; a reply that comes too late is dropped; both are counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from tinker.runtime.clock import Clock, MonotonicClock
from tinker.runtime.supervision import NEVER, Death, Intensity, Restart

M = TypeVar("M")
R = TypeVar("R")

STOPPED_GRACE = 5.0  # seconds `stopped` may take


class ActorError(Exception):
    """Base of what goes wrong here."""


class ActorDead(ActorError):
    """The actor has ended; the message was not handled, or not to its end. `death` says why."""

    def __init__(self, death: Death) -> None:
        super().__init__(str(death))
        self.death = death


class MailboxFull(ActorError):
    """The message was not taken: slow down, or give it up."""


class AskTimeout(ActorError):
    """No answer within the deadline. Whether the message was or will be handled is unknown."""


class Actor(Generic[M, R]):
    """Subclass this. The constructor must be quick; what takes time belongs into `started`."""

    async def started(self) -> None:
        """Runs before the first message, after every restart too. Raising is a failure."""

    async def receive(self, message: M) -> R:
        """Handle one message; the next one waits. What it returns answers an ask. Raising is a failure."""
        raise NotImplementedError

    async def stopped(self) -> None:
        """Runs after the last message, however it ended (also before a restart), within STOPPED_GRACE seconds."""


@dataclass(slots=True)
class Counts:
    """What happened to an actor's messages."""

    handled: int = 0
    failed: int = 0
    restarts: int = 0
    late: int = 0  # replies nobody waited for any more
    abandoned: int = 0  # asks given up before their turn


class ActorRef(Generic[M, R]):
    """How others reach an actor. Outlives it."""

    __slots__ = ("_cell",)

    def __init__(self, cell: _Cell[M, R]) -> None:
        self._cell = cell

    @property
    def name(self) -> str:
        return self._cell.name

    @property
    def alive(self) -> bool:
        return self._cell.death is None

    @property
    def waiting(self) -> int:
        """Messages in the mailbox."""
        return len(self._cell.mailbox)

    @property
    def counts(self) -> Counts:
        return self._cell.counts

    def tell(self, message: M) -> None:
        """Put a message into the mailbox. MailboxFull, ActorDead."""
        self._cell.post(message, None)

    async def ask(self, message: M, *, deadline: float) -> R:
        """The reply, within `deadline` seconds. See the module for the outcomes."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._cell.post(message, answer)
        with anyio.move_on_after(deadline):
            return await answer  # a cancelled wait cancels it too, which tells the actor that nobody listens
        raise AskTimeout(f"actor {self.name!r} did not answer {type(message).__name__} within {deadline:g} s")

    async def dead(self) -> Death:
        """Wait until it has ended. No deadline: an actor may live as long as the process."""
        return await self._cell.over()

    def watch(self, callback: Callable[[Death], None]) -> None:
        """Call this once when it has ended; at once if it has already."""
        if self._cell.death is None:
            self._cell.watchers = (*self._cell.watchers, callback)
        else:
            callback(self._cell.death)

    def stop(self) -> None:
        """Let it finish the message at hand and end; those in the mailbox are answered with ActorDead."""
        self._cell.stop()

    def kill(self) -> None:
        """End it now, in the middle of a message if need be."""
        self._cell.scope.cancel()


class ActorSystem:
    """Owns the actors' tasks. Leaving it stops them all: `grace` seconds for messages at hand, then they are cancelled; with an exception
    they are cancelled at once. `on_failure(name, error)` hears of every failure."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        grace: float = 5.0,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._grace = grace
        self._on_failure = on_failure
        self._group: TaskGroup = anyio.create_task_group()
        self._cells: dict[str, _Cell[Any, Any]] = {}

    async def __aenter__(self) -> ActorSystem:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        cells = list(self._cells.values())
        try:
            if error is None:
                for cell in cells:
                    cell.stop()
                with anyio.move_on_after(self._grace):
                    for cell in cells:
                        await cell.over()
        finally:
            self._group.cancel_scope.cancel()
            await self._group.__aexit__(None, None, None)  # the body's own exception goes on as it is, in no group

    def spawn(
        self, name: str, factory: Callable[[], Actor[M, R]], *, mailbox: int = 64, restart: Restart = NEVER
    ) -> ActorRef[M, R]:
        """Build the actor now, so that what its constructor raises is raised here, and start it. Names of living actors are unique."""
        if name in self._cells:
            raise ActorError(f"an actor named {name!r} is alive: stop it first, or choose another name")
        cell = _Cell(name, factory, mailbox, Intensity(restart), self._clock, self._on_failure)
        self._cells[name] = cell
        cell.watchers = (self._forget,)
        self._group.start_soon(cell.run, name=f"actor {name}")
        return ActorRef(cell)

    def _forget(self, death: Death) -> None:
        del self._cells[death.actor]


@dataclass(slots=True)
class _Envelope(Generic[M, R]):
    message: M
    answer: asyncio.Future[R] | None


class _Cell(Generic[M, R]):
    """One actor's mailbox, task and life, across restarts. An actor that waits for work holds nothing that it may never need."""

    __slots__ = (
        "_at_hand",
        "_capacity",
        "_clock",
        "_ended",
        "_factory",
        "_intensity",
        "_next_life",
        "_on_failure",
        "_resting",
        "_stopping",
        "_wake",
        "counts",
        "death",
        "mailbox",
        "name",
        "scope",
        "watchers",
    )

    def __init__(
        self,
        name: str,
        factory: Callable[[], Actor[M, R]],
        capacity: int,
        intensity: Intensity,
        clock: Clock,
        on_failure: Callable[[str, Exception], None] | None,
    ) -> None:
        self.name = name
        self.mailbox: deque[_Envelope[M, R]] | tuple[()] = ()
        self.counts = Counts()
        self.death: Death | None = None
        self.watchers: tuple[Callable[[Death], None], ...] = ()
        self.scope = anyio.CancelScope()
        self._factory = factory
        self._next_life: Actor[M, R] | None = factory()
        self._capacity = capacity
        self._intensity = intensity
        self._clock = clock
        self._on_failure = on_failure
        self._ended: anyio.Event | None = None  # once somebody waits for the end
        self._at_hand: _Envelope[M, R] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._stopping = False
        self._resting = False

    # --- from outside ---

    def post(self, message: M, answer: asyncio.Future[R] | None) -> None:
        if self.death is not None:
            raise ActorDead(self.death)
        if self._stopping:
            raise ActorDead(Death(self.name, "is stopping"))
        if len(self.mailbox) >= self._capacity:
            raise MailboxFull(f"{self._capacity} messages wait for actor {self.name!r}, which is all its mailbox holds")
        if not isinstance(self.mailbox, deque):
            self.mailbox = deque()
        self.mailbox.append(_Envelope(message, answer))
        self._rouse()

    async def over(self) -> Death:
        """Wait for its end."""
        if self.death is None:
            self._ended = self._ended or anyio.Event()
            await self._ended.wait()
        assert self.death is not None
        return self.death

    def stop(self) -> None:
        self._stopping = True
        self._rouse()
        if self._resting:
            self.scope.cancel()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- its task ---

    async def run(self) -> None:
        death = Death(self.name, "was cancelled")
        try:
            with self.scope:
                death = await self._lives()
        finally:
            self._die(Death(self.name, "was stopped") if self._stopping and death.reason == "was cancelled" else death)

    async def _lives(self) -> Death:
        """One life after the other, until it is stopped or its policy gives it up."""
        while True:
            try:
                await self._live()
                return Death(self.name, "was stopped")
            except Exception as error:  # foreign code: whatever it raises is a failure of this actor
                failure = error
            self.counts.failed += 1
            if self._on_failure is not None:
                self._on_failure(self.name, failure)
            pause = self._intensity.failed(self._clock.now())
            if pause is None:
                return Death(self.name, "failed and was given up", failure)
            if self._stopping:
                return Death(self.name, "failed while it was stopped", failure)
            self._resting = True
            await self._clock.sleep_until(self._clock.now() + pause)
            self._resting = False
            self.counts.restarts += 1

    async def _live(self) -> None:
        actor, self._next_life = self._next_life or self._factory(), None
        try:
            await actor.started()
            while not self._stopping:
                envelope = self._next()
                if envelope is not None:
                    await self._handle(actor, envelope)
                    continue
                self._wake = asyncio.get_running_loop().create_future()
                try:
                    await self._wake  # no deadline: an actor waits for work as long as it lives
                finally:
                    self._wake = None
        except BaseException:
            try:
                await _finish(actor)
            except Exception as error:  # the first failure is the one to report
                self.counts.failed += 1
                if self._on_failure is not None:
                    self._on_failure(self.name, error)
            raise
        await _finish(actor)

    def _next(self) -> _Envelope[M, R] | None:
        """The next message somebody still wants handled."""
        while self.mailbox:
            envelope = self.mailbox.popleft()
            if envelope.answer is None or not envelope.answer.done():
                return envelope
            self.counts.abandoned += 1
        self.mailbox = ()
        return None

    async def _handle(self, actor: Actor[M, R], envelope: _Envelope[M, R]) -> None:
        self._at_hand = envelope
        try:
            reply = await actor.receive(envelope.message)
        except asyncio.CancelledError as cancelled:
            if anyio.get_current_task().has_pending_cancellation():
                raise
            # nobody cancelled this actor: it awaited something that was cancelled, which is a failure like others
            self._at_hand = None
            error = ActorError(f"actor {self.name!r} awaited something that was cancelled")
            self._fail(envelope, error)
            raise error from cancelled
        except Exception as error:
            self._at_hand = None
            self._fail(envelope, error)
            raise
        self._at_hand = None
        self.counts.handled += 1
        if envelope.answer is None:
            return
        if envelope.answer.done():
            self.counts.late += 1
        else:
            envelope.answer.set_result(reply)

    def _fail(self, envelope: _Envelope[M, R], error: Exception) -> None:
        if envelope.answer is not None and not envelope.answer.done():
            envelope.answer.set_exception(error)

    def _die(self, death: Death) -> None:
        """Tell everyone who waits, then the watchers."""
        self.death = death
        waiting = [self._at_hand, *self.mailbox] if self._at_hand is not None else list(self.mailbox)
        self.mailbox = ()
        self._at_hand = None
        for envelope in waiting:
            self._fail(envelope, ActorDead(death))
        if self._ended is not None:
            self._ended.set()
        for watcher in self.watchers:
            watcher(death)


async def _finish(actor: Actor[Any, Any]) -> None:
    with anyio.CancelScope(shield=True), anyio.fail_after(STOPPED_GRACE):
        await actor.stopped()
