"""The client: one connection to a coordinator, many things awaited on it at once.

Each awaited thing has a key of its own (a turn, an operation, a barrier), so answers may come in any order. Whatever ends the connection or
the run answers every waiter with an error: nobody waits for ever (I5). One task, `serve`, reads; everything else only sends and waits.

Whatever is awaited is asked again until it is answered (`tinker.client.asked`), and at once after we joined anew: the coordinator restarted
(its epoch is higher then) or gave us up. A coordinator of a lower epoch is an old one that woke up; what it says is not heard. While the
coordinator is silent one question at a time is sent, so that it is not flooded when it is back; after `patience` seconds it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import anyio

from tinker.client.asked import FIRST, Asked, Question
from tinker.client.hand import Hand
from tinker.client.waiters import (
    ClientError,
    CoordinatorLost,
    OperationError,
    RunOver,
    TurnError,
    Waiters,
)
from tinker.protocol import ToAny, ToHost
from tinker.protocol.operations import Result
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import (
    Arrivals,
    Arrive,
    Bye,
    EndRun,
    Enlist,
    EpisodeEnded,
    Heartbeat,
    Hello,
    InHand,
    OpenTurn,
    Operate,
    Played,
    Retire,
    RunSpec,
    Submit,
)
from tinker.protocol.to_host import (
    Admitted,
    CoordinatorLoad,
    Delivered,
    Enlisted,
    MayUpdate,
    Missing,
    Opened,
    OperationDone,
    OperationFailed,
    Play,
    Queued,
    RunStopped,
    Settled,
    TurnClosed,
    TurnRefused,
    UpdateEnded,
)
from tinker.protocol.values import AgentName, Edge, EpisodeId, Phase, RunId
from tinker.runtime.clock import LATE, Clock
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.pauses import Pauses
from tinker.runtime.transport import Closed, Connection, PeerSlow, Unauthorized

Received = ToHost | ToAny
Event = Queued | Missing | CoordinatorLoad | Draining | Settled
GRACE = 5.0  # seconds for the last messages when leaving
PATIENCE = 60.0  # seconds a coordinator may be silent before it is lost
BEAT = 1.0  # seconds between looks at what must be asked again
REMEMBERED = 4096  # answers that came, so that one that comes again is known
OF_ENLISTED = (
    "InHand",
    "Played",
    "Retire",
)  # refused, if the coordinator does not know (any more) that we are enlisted
NO_ANSWER = (
    "EpisodeEnded",
    "EndRun",
    "Heartbeat",
    *OF_ENLISTED,
)  # refused, they were late, unless somebody asks them again


class Client:
    """Use: enter it, run `serve` in a task group inside, await `joined`, then the rest. Calls may run concurrently.

    `on_event` is told what concerns nobody in particular: Queued (when it changes), Missing, CoordinatorLoad, Draining, Settled. A client
    is the learner host's (`submit`) or a further host's (`enlist`). `deliveries`: what further hosts have played. `admitted`: what we were
    told last of our run; it is told again when another task server updates it from now on.
    """

    def __init__(
        self,
        connection: Connection,
        hello: Hello,
        clock: Clock,
        on_event: Callable[[Event], None] = lambda event: None,
        patience: float = PATIENCE,
    ) -> None:
        self.lease = 15.0
        self.epoch = 0
        self.admitted: Admitted | None = None
        self._patience = patience
        self._connection = connection
        self._hello = hello
        self._clock = clock
        self._on_event = on_event
        self._waiters = Waiters()
        self._heard = clock.now()
        self._probe = Question(Heartbeat(), 0.0)
        self._member = False
        self._fenced = False
        self._pauses = Pauses(hello.name)
        self._asked = Asked(self._pauses)
        self._came: dict[Hashable, None] = {}
        self._run = RunId("")
        self._enlist: Enlist | None = None
        self._hand = Hand()
        self._starts: dict[tuple[int, AgentName], Arrive | Arrivals] = {}
        self._ended: dict[tuple[int, Phase], dict[EpisodeId, EpisodeEnded]] = {}
        self._queued = ""
        self._play, self.plays = anyio.create_memory_object_stream[Play](4096)
        self._deliver, self.deliveries = anyio.create_memory_object_stream[Delivered](4096)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close what is still open, without waiting for anybody."""
        for stream in (self._play, self.plays, self._deliver, self.deliveries):
            stream.close()
        with anyio.CancelScope(shield=True):
            await self._connection.aclose()

    async def serve(self) -> None:
        """Read until the connection ends or is given up. Every waiter has been answered when this returns."""
        self._hello_now()
        reason = "the connection to the coordinator was closed"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_lease, name="keep lease")
                tasks.start_soon(self._ask_again, name="ask again")
                try:
                    reason = await self._read()
                except Unauthorized as error:
                    reason = str(error)
                except Closed:
                    pass
                tasks.cancel_scope.cancel()
        finally:
            self._lost(reason)

    async def _read(self) -> str:
        while self._waiters.broken is None:
            for data in await self._connection.receive_many():
                try:
                    self._take(decode(data, Received))
                except WireError as error:
                    return f"the coordinator sent what is no message ({error})"
        return "the run is over"

    async def joined(self, within: float = PATIENCE, address: str = "its address") -> Welcome:
        """Wait until the coordinator has accepted this host; ClientError with its reason if it does not, CoordinatorLost if it has said
        nothing for so many seconds in which we ran (while we are stopped we do not hear)."""
        waited = 0.0
        while waited < within:
            began = self._clock.now()
            with anyio.move_on_after(BEAT):
                return cast(Welcome, await self._waiters.get(Welcome))
            waited += min(self._clock.now() - began, LATE)
        raise CoordinatorLost(f"no coordinator answers at {address}; start one with `opentinker coordinator`")

    async def submit(self, spec: RunSpec) -> Admitted:
        """Hand in a run and wait until it may begin (a queue has no deadline: `on_event` says what it waits for)."""
        self._run = spec.run
        self._ask(Admitted, Submit(spec))
        return cast(Admitted, await self._answer(Admitted))

    async def enlist(self, message: Enlist) -> Enlisted:
        """Become a further host of a run, and be one again whenever the coordinator has lost us. `plays` has what it deals."""
        self._run, self._enlist = message.run, message
        self._ask(Enlisted, message)
        enlisted = cast(Enlisted, await self._answer(Enlisted))
        self._asked.add(InHand, InHand(self._run, ()), self._clock.now())
        return enlisted

    @property
    def broken(self) -> ClientError | None:
        """Why nothing is answered any more (None: it is)."""
        return self._waiters.broken

    def retire(self) -> None:
        """Be dealt nothing more. Once `on_event` hears of `Settled` without deals, what is in hand is the last."""
        self._ask(Retire, Retire(self._run))

    def deliver(self, message: Played) -> None:
        """We have played these; it is said again until the deal is settled."""
        if message.deal in self._hand.open:
            self._ask((message.deal, message.episodes), message)

    async def arrive(self, message: Arrive | Arrivals) -> None:
        """Say that an agent has arrived at a barrier, or several together; `opened` waits for the barrier. One that has opened without
        them is told nothing."""
        if (message.round, message.phase, message.edge) in self._came:
            return
        agents = (message.agent,) if isinstance(message, Arrive) else message.agents
        if (message.phase, message.edge) == (Phase.UPDATE, Edge.START):
            self._starts.update({(message.round, agent): message for agent in agents})
        self._ask((message.round, message.phase, message.edge, agents), message)

    async def opened(self, round: int, phase: Phase, edge: Edge) -> Opened:
        """Wait until a barrier opens. No deadline: who is missing is said every 10 s, and the run's end answers."""
        if edge == Edge.END and (round, phase, edge) not in self._came:
            for message in self._ended.get((round, phase), {}).values():  # one of them may have been lost
                self._asked.add(message.episode, message, self._clock.now())
        return cast(Opened, await self._waiters.get((round, phase, edge)))

    async def left_out(self, round: int, phase: Phase) -> frozenset[str]:
        """Wait until a rollout or evaluation ends without some of its episodes, which does not happen to most; returns which."""
        return frozenset(cast(Opened, await self._waiters.get(("left out", round, phase))).dropped)

    async def may_update(self, round: int, agent: AgentName) -> None:
        """Wait until the update gate admits this agent. OperationError if the round's updates end without it."""
        start = self._starts.get((round, agent))
        if (round, Phase.UPDATE, Edge.END) in self._came and (round, agent) not in self._came:
            raise _too_late(agent)
        if start is not None and (round, agent) not in self._came:
            self._asked.add((round, agent), start, self._clock.now())  # its repetition is answered with what followed
        await self._answer((round, agent))

    async def begin_update(self, message: Arrive) -> None:
        """The agent has a batch, in a run whose agents may lag: wait until it may update."""
        self._ask((message.round, message.agent), message)
        await self._answer((message.round, message.agent))

    async def end_update(self, message: Arrive) -> None:
        """The agent is back from its update, or has none: wait until that is known and its version is loaded everywhere."""
        key = "ended", message.round, message.agent
        self._ask(key, message)
        await self._answer(key)

    async def turn(self, message: OpenTurn) -> TurnClosed:
        """Open a turn and wait until it closes (the coordinator keeps its deadline). TurnError if the gate refuses."""
        self._ask(message.turn, message)
        return cast(TurnClosed, await self._answer(message.turn))

    async def operate(self, message: Operate) -> Result:
        """Run an operation on a worker. OperationError with the worker's reason if it fails."""
        self._ask(message.op, message)
        return cast(Result, await self._answer(message.op))

    def account(self, message: EpisodeEnded) -> None:
        """One episode is over. It is said again while somebody waits for the end of its phase, and when we are told to play it again;
        what is said of it first counts."""
        phase = message.episode.round, message.episode.phase
        if (*phase, Edge.END) in self._came:
            return
        first = self._ended.setdefault(phase, {}).setdefault(message.episode, message)
        self._hand.done(message.episode)
        if self._member:
            self._send(first)

    def end(self, run: RunId, reason: str) -> None:
        """The run is over; everything that belongs to it may be freed."""
        self._asked.clear()
        self._ended.clear()
        self._starts.clear()
        self._send(EndRun(run, reason))

    async def leave(self, reason: str) -> None:
        """Say good-bye and close the connection."""
        self._send(Bye(reason))
        await self._connection.aclose(GRACE)

    def abandon(self, reason: str) -> None:
        """Answer every waiter with CoordinatorLost and this reason (the caller knows that the coordinator's process has ended)."""
        self._break(CoordinatorLost(reason))

    def _ask(self, key: Hashable, message: Any) -> None:
        """Say it, and again until `_answer` has its answer. While we are no member it waits until we are."""
        self._asked.add(key, message, self._clock.now())
        if self._member:
            self._send(message)

    async def _answer(self, key: Hashable) -> Any:
        try:
            return await self._waiters.get(key)
        finally:
            self._asked.drop(key)

    def _send(self, message: Any) -> None:
        """A frame that finds no room, or comes after we have left, is lost like one that is lost on the way. What is in hand is said as it
        is now."""
        if isinstance(message, InHand):
            message = InHand(message.run, self._hand.deals)
        if self._waiters.broken is None or isinstance(message, Bye | EndRun):
            with suppress(PeerSlow, Closed):
                self._connection.send(encode(message))

    async def _ask_again(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now() + BEAT)
            now = self._clock.now()
            if not self._member:
                if self._probe.due <= now:
                    self._probe.again(now, self._pauses)
                    self._send(self._hello)
            elif now - self._heard < FIRST:
                self._probe = Question(Heartbeat(), now + FIRST)
                for message in self._asked.overdue(now):
                    self._send(message)
            elif self._asked and self._probe.due <= now:
                self._probe.again(now, self._pauses)
                self._send(self._asked.next())

    # --- membership ---

    def _hello_now(self) -> None:
        self._member = False
        self._probe = Question(self._hello, self._clock.now() + FIRST)
        self._send(self._hello)

    def _stranger(self) -> None:
        """We are no member (any more): join anew, under a new incarnation."""
        if self._member:
            self._hello = replace(self._hello, incarnation=self._hello.incarnation + 1)
            self._hello_now()

    def _welcome(self, message: Welcome) -> None:
        self._fenced = message.epoch < self.epoch
        if self._fenced:
            return
        self.lease, self.epoch = message.lease, message.epoch
        self._waiters.put(Welcome, message, keep=True)
        if self._member:
            return
        self._member = True
        if self._enlist is not None:
            self._send(self._enlist)
        for ended in self._ended.values():
            for each in ended.values():
                self._send(each)
        for question in self._asked.everything(self._clock.now()):
            self._send(question)

    def _lost(self, reason: str) -> None:
        self._break(CoordinatorLost(f"{reason}; look at its log, start it again, and run again"))

    def _break(self, error: ClientError) -> None:
        self._waiters.break_all(error)
        self._play.close()
        self._deliver.close()

    async def _keep_lease(self) -> None:
        while True:
            due = self._clock.now() + min(self.lease / 3, self._patience)
            await self._clock.sleep_until(due)
            if self._member:
                self._send(Heartbeat())
            if self._clock.now() - due > LATE:
                self._heard = self._clock.now()
            if self._clock.now() - self._heard > self._patience:
                self._lost(f"the coordinator was not heard for {self._patience:.0f} s")

    # --- what comes ---

    def _take(self, message: Received) -> None:
        if isinstance(message, Welcome):
            self._welcome(message)
        if self._fenced or self._waiters.broken:  # from a coordinator that was replaced, or after the run's end
            if isinstance(message, Refused) and message.stranger and not self._waiters.broken:
                self._stranger()  # perhaps it is not the old one: Hello, and whoever says Welcome says its epoch
            return
        self._heard = self._clock.now()
        put = self._waiters.put
        match message:
            case TurnClosed():
                put(message.turn, message)
            case TurnRefused():
                put(message.turn, TurnError(message.reason, message.fenced))
            case Opened():
                self._barrier(message)
            case Play():
                self._played(message)
            case MayUpdate() if self._first((message.round, message.agent)):
                self._asked.drop((message.round, message.agent))
                put((message.round, message.agent), message, keep=True)
            case UpdateEnded():
                put(("ended", message.round, message.agent), message)
            case OperationDone():
                put(message.op, message.result)
            case OperationFailed():
                put(message.op, OperationError(message.reason, message.lost))
            case Delivered():
                self._delivered(message)
            case Settled():
                self._settled(message)
            case Admitted() | Enlisted():
                self.admitted = message if isinstance(message, Admitted) else self.admitted
                put(type(message), message)
            case RunStopped() if self._run in ("", message.run):
                self._break(RunOver(message.reason, message.finished))
            case Refused():
                self._refused(message)
            case Queued() if message.reason == self._queued:
                return
            case Queued() | Missing() | CoordinatorLoad() | Draining():
                self._queued = message.reason if isinstance(message, Queued) else self._queued
                self._on_event(message)

    def _first(self, key: Hashable) -> bool:
        """Whether this comes for the first time."""
        if key in self._came:
            return False
        self._came[key] = None
        if len(self._came) > REMEMBERED:
            del self._came[next(iter(self._came))]
        return True

    def _barrier(self, message: Opened) -> None:
        at = message.round, message.phase, message.edge
        if not self._first(at):
            return
        self._asked.drop_all(lambda key: isinstance(key, tuple) and key[:3] == at)
        if message.edge == Edge.END:
            for episode in self._ended.pop(at[:2], {}):
                self._asked.drop(episode)
            self._hand.end(*at[:2])
            self._starts = {key: each for key, each in self._starts.items() if key[0] > message.round}
            self._asked.drop(at[:2])
            self._left_out(message)
        elif message.phase != Phase.UPDATE:
            self._asked.add(at[:2], InHand(self._run, ()), self._clock.now())  # what we are dealt may be lost
        self._waiters.put(at, message, keep=True)

    def _left_out(self, message: Opened) -> None:
        """Release whoever waits for what does not come any more in this round."""
        if message.phase != Phase.UPDATE:
            if message.dropped:
                self._waiters.put(("left out", message.round, message.phase), message, keep=True)
            return
        for agent in message.dropped:
            key = message.round, AgentName(agent)
            self._asked.drop(key)
            if key not in self._came:
                self._waiters.put(key, _too_late(key[1]))

    def _played(self, message: Play) -> None:
        phase = message.round, message.phase
        if (*phase, Edge.END) in self._came:
            return
        if self._hand.take(message):
            self._play.send_nowait(message)
            return
        for episode in message.episodes:  # told again: our account of it was lost
            if episode in self._ended.get(phase, {}):
                self._send(self._ended[phase][episode])

    def _delivered(self, message: Delivered) -> None:
        if (message.deal.round, message.deal.phase, Edge.END) not in self._came:
            with suppress(anyio.WouldBlock):  # it is delivered again
                self._deliver.send_nowait(message)

    def _settled(self, message: Settled) -> None:
        if message.run == self._run:
            self._hand.settle(message.deals)
            if not message.deals:
                self._asked.drop(Retire)
            self._asked.drop_all(lambda key: isinstance(key, tuple) and key[0] in message.deals)
            self._on_event(message)

    def _refused(self, message: Refused) -> None:
        if message.stranger:
            self._stranger()
        elif message.what in OF_ENLISTED and self._enlist is not None:
            self._send(self._enlist)
        elif message.what in NO_ANSWER and not self._asked.names(message.what):
            return
        elif self._hello.incarnation and message.what != "Hello":
            self._lost(f"the coordinator restarted and refused {message.what} ({message.reason})")
        else:
            self._break(ClientError(f"the coordinator refused {message.what}: {message.reason}"))


def _too_late(agent: AgentName) -> OperationError:
    return OperationError(f"{agent} was left out: the updates ended before its turn had come")
