"""The client: one connection to a coordinator, many things awaited on it at once.

Each awaited thing has a key of its own (a turn, an operation, a barrier), so answers may come in any order. Whatever ends the connection or
the run answers every waiter with an error: nobody waits for ever (I5). One task, `serve`, reads; everything else only sends and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import anyio

from tinker.protocol import ToAny, ToHost
from tinker.protocol.operations import Result
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import (
    Arrive,
    Bye,
    EndRun,
    EpisodeEnded,
    Heartbeat,
    Hello,
    OpenTurn,
    Operate,
    RunSpec,
    Submit,
)
from tinker.protocol.to_host import (
    Admitted,
    CoordinatorLoad,
    MayUpdate,
    Missing,
    Opened,
    OperationDone,
    OperationFailed,
    Play,
    Queued,
    RunStopped,
    TurnClosed,
    TurnRefused,
)
from tinker.protocol.values import AgentName, Edge, Phase, RunId
from tinker.runtime.clock import Clock
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.transport import Closed, Connection

Received = ToHost | ToAny
T = TypeVar("T")
GRACE = 5.0  # seconds for the last messages when leaving


class ClientError(Exception):
    """The coordinator could not be asked, or refused."""


class CoordinatorLost(ClientError):
    """The coordinator has not been heard for two leases, or the connection was closed."""


class RunOver(ClientError):
    """The coordinator ended the run; the message says why."""


class TurnError(ClientError):
    """The gate refused the turn."""


class OperationError(ClientError):
    """A worker could not do the operation, or the gate refused it."""


class _Waiters:
    """Futures by key. What comes for a key nobody waits for is kept if somebody may still ask for it, else counted as late."""

    def __init__(self) -> None:
        self.waiting: dict[object, tuple[anyio.Event, list[Any]]] = {}
        self.early: dict[object, Any] = {}
        self.broken: ClientError | None = None

    async def get(self, key: object) -> Any:
        if key in self.early:
            return _or_raise(self.early.pop(key))
        if self.broken is not None:
            raise self.broken
        event, box = self.waiting.setdefault(key, (anyio.Event(), []))
        try:
            await event.wait()
        finally:
            self.waiting.pop(key, None)
        return _or_raise(box[0])

    def put(self, key: object, value: Any, *, keep: bool = False) -> None:
        if key in self.waiting:
            event, box = self.waiting[key]
            if not box:
                box.append(value)
            event.set()
        elif keep:
            self.early[key] = value

    def break_all(self, error: ClientError) -> None:
        self.broken = self.broken or error
        for event, box in self.waiting.values():
            if not box:
                box.append(self.broken)
            event.set()


def _or_raise(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class Client:
    """Use: enter it, run `serve` in a task group inside, await `joined`, then the rest. Calls may run concurrently.

    `on_event` is told what concerns nobody in particular: Queued, Missing, CoordinatorLoad, Draining.
    """

    def __init__(
        self,
        connection: Connection,
        hello: Hello,
        clock: Clock,
        on_event: Callable[[Queued | Missing | CoordinatorLoad | Draining], None] = lambda event: None,
    ) -> None:
        self.lease = 15.0
        self._connection = connection
        self._hello = hello
        self._clock = clock
        self._on_event = on_event
        self._waiters = _Waiters()
        self._heard = clock.now()
        send, self.plays = anyio.create_memory_object_stream[Play](4096)
        self._play = send

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close what is still open, without waiting for anybody."""
        self._play.close()
        self.plays.close()
        with anyio.CancelScope(shield=True):
            await self._connection.aclose()

    async def serve(self) -> None:
        """Read until the connection ends or is given up. Every waiter has been answered when this returns."""
        self._send(self._hello)
        reason = "the connection to the coordinator was closed"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_lease, name="keep lease")
                with suppress(Closed):
                    reason = await self._read()
                tasks.cancel_scope.cancel()
        finally:
            self._lost(reason)

    async def _read(self) -> str:
        while self._waiters.broken is None:
            for data in await self._connection.receive_many():
                self._heard = self._clock.now()
                try:
                    self._take(decode(data, Received))
                except WireError as error:
                    return f"the coordinator sent what is no message ({error})"
        return "the run is over"

    async def joined(self) -> Welcome:
        """Wait until the coordinator has accepted this host; ClientError with its reason if it does not."""
        return cast(Welcome, await self._waiters.get(Welcome))

    async def submit(self, spec: RunSpec) -> Admitted:
        """Hand in a run and wait until it may begin (a queue has no deadline: `on_event` says what it waits for)."""
        self._send(Submit(spec))
        return cast(Admitted, await self._waiters.get(Admitted))

    async def arrive(self, message: Arrive) -> None:
        """Say that an agent has arrived at a barrier; `opened` waits for the barrier."""
        self._send(message)

    async def opened(self, round: int, phase: Phase, edge: Edge) -> Opened:
        """Wait until a barrier opens. No deadline: who is missing is said every 10 s, and the run's end answers."""
        return cast(Opened, await self._waiters.get((round, phase, edge)))

    async def may_update(self, round: int, agent: AgentName) -> None:
        """Wait until the update gate admits this agent."""
        await self._waiters.get((round, agent))

    async def turn(self, message: OpenTurn) -> TurnClosed:
        """Open a turn and wait until it closes (the coordinator keeps its deadline). TurnError if the gate refuses."""
        self._send(message)
        return cast(TurnClosed, await self._waiters.get(message.turn))

    async def operate(self, message: Operate) -> Result:
        """Run an operation on a worker. OperationError with the worker's reason if it fails."""
        self._send(message)
        return cast(Result, await self._waiters.get(message.op))

    def account(self, message: EpisodeEnded) -> None:
        """One episode is over."""
        self._send(message)

    def end(self, run: RunId, reason: str) -> None:
        """The run is over; everything that belongs to it may be freed."""
        self._send(EndRun(run, reason))

    async def leave(self, reason: str) -> None:
        """Say good-bye and close the connection."""
        self._send(Bye(reason))
        await self._connection.aclose(GRACE)

    def abandon(self, reason: str) -> None:
        """Answer every waiter with CoordinatorLost and this reason (the caller knows that the coordinator's process has ended)."""
        self._break(CoordinatorLost(reason))

    def _send(self, message: Any) -> None:
        if self._waiters.broken is None or isinstance(message, Bye | EndRun):
            self._connection.send(encode(message))

    def _lost(self, reason: str) -> None:
        self._break(CoordinatorLost(f"{reason}; look at its log, start it again, and run again"))

    def _break(self, error: ClientError) -> None:
        self._waiters.break_all(error)
        self._play.close()

    async def _keep_lease(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now() + self.lease / 3)
            self._send(Heartbeat())
            if self._clock.now() - self._heard > 2 * self.lease:
                self._lost(f"the coordinator was not heard for {2 * self.lease:.0f} s")

    def _take(self, message: Received) -> None:
        put = self._waiters.put
        match message:
            case TurnClosed():
                put(message.turn, message)
            case TurnRefused():
                put(message.turn, TurnError(message.reason))
            case Opened():
                put((message.round, message.phase, message.edge), message, keep=True)
            case Play():
                self._play.send_nowait(message)
            case MayUpdate():
                put((message.round, message.agent), message, keep=True)
            case OperationDone():
                put(message.op, message.result)
            case OperationFailed():
                put(message.op, OperationError(message.reason))
            case Welcome():
                self.lease = message.lease
                put(Welcome, message, keep=True)
            case Admitted():
                put(Admitted, message)
            case RunStopped():
                self._break(RunOver(message.reason))
            case Refused():
                self._refused(message)
            case Queued() | Missing() | CoordinatorLoad() | Draining():
                self._on_event(message)

    def _refused(self, message: Refused) -> None:
        self._break(ClientError(f"the coordinator refused {message.what}: {message.reason}"))
