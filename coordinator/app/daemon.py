"""The coordinator daemon: the pure core behind a socket.

One task reads bursts of messages, steps the core and sends what it says; one task tells it that time has passed. Nothing else touches the
core. A message that is no message, or comes from somebody who is no member, is refused, counted, and never crashes anybody. When it is
told to stop it drains: nothing new begins, and its hosts have a while to end their runs.

A connection that closes makes a member unreachable, and only the end of its lease makes it lost; but the end of a process of this machine
is seen (`coordinator.app.deaths`), and whoever it was is lost as soon as its connection has closed, too.

What the core is told goes into the journal before what it says leaves (`coordinator.app.journal`), one write for each burst. While the
journal cannot be written nothing is read and nothing is sent: peers wait, as if we were slow, until there is room again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import anyio
import structlog

from coordinator.app import events
from coordinator.app.access import ASKS, Access
from coordinator.app.arrays import Arrays, Missing
from coordinator.app.bounded import status_of
from coordinator.app.deaths import Deaths
from coordinator.app.journal import Recorder
from coordinator.app.snapshot import Snapshot, snapshot
from coordinator.core.coordinator import Coordinator, MemberRefused
from coordinator.core.run import Sends
from tinker.protocol import ToCoordinator, ToDaemon
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import Bye, Generated, Heartbeat, Hello, OpenTurn
from tinker.protocol.to_daemon import Drain, Watch
from tinker.protocol.to_host import CoordinatorLoad, Opened, TurnRefused
from tinker.protocol.values import Edge, PeerName, Phase, Role
from tinker.runtime.clock import Clock
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.journal import JournalError
from tinker.runtime.transport import Arrival, Disconnected, Listener, PeerGone, PeerKey, Unfit

TICK = 0.25  # seconds between looks at deadlines and leases
MOMENT = 0.05  # seconds between looks whether all hosts have left
LATE = 2.0  # a tick later than this says that we slept: for one lease we only listen, so that everybody is heard before a lease may end
GRACE = 3.0  # seconds for the last messages when stopping
DRAIN = 10.0  # seconds that hosts have to end their runs when we stop

Heard = ToCoordinator | ToDaemon
REFUSALS = (Refused, TurnRefused)
LOAD_WITH = frozenset(
    {(Phase.ROLLOUT, Edge.END), (Phase.EVALUATE, Edge.END)}
)  # barriers after which turns have been played

log = structlog.get_logger("coordinator")


@dataclass(slots=True)
class Daemon:
    """Serves one core on one listener until `stop` is called or its task is cancelled. `grace`: seconds to drain. `refusals`: how often
    what was refused, and why (a few words of our own). `on_opened` hears of every barrier that opens. `recorder`: the core behind its
    journal (None: it has none). `counts`: what we could not deliver, by name. `stuck`: why the journal cannot be written ("": it can).
    `deaths`: sees the end of processes of this machine (None: nobody does)."""

    core: Coordinator
    listener: Listener
    clock: Clock
    cpu: Callable[[], float] = time.process_time
    grace: float = DRAIN
    on_opened: Callable[[Opened], None] = lambda opening: None
    names: dict[PeerKey, PeerName] = field(default_factory=dict)
    keys: dict[PeerName, PeerKey] = field(default_factory=dict)
    messages: int = 0
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    access: Access | None = None
    serving: bool = False
    recorder: Recorder | None = None
    arrays: Arrays = field(default_factory=Arrays)
    counts: Counter[str] = field(default_factory=Counter)
    stuck: str = ""
    deaths: Deaths | None = None
    _inputs: Recorder = field(init=False)
    _arrays: Arrays | None = field(init=False)
    _outgoing: list[tuple[PeerKey, object]] = field(default_factory=list)
    _began: float = 0.0
    _cpu_before: float = 0.0
    _stopping: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self._began = self.clock.now()
        self._inputs = self.recorder or Recorder(self.core)
        self._arrays = self.arrays if self._inputs.journal is not None else None  # who keeps no journal needs no stubs

    async def serve(self) -> None:
        self._cpu_before = self.cpu()
        log.info("listening", address=self.listener.address, epoch=self.core.epoch)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, name="read")
                tasks.start_soon(self._watch, name="watch deadlines")
                if self.deaths is not None:
                    tasks.start_soon(self.deaths.watch, self._ended, name="watch processes")
                self.serving = True
                await self._stopping.wait()
                await self._drain()
                tasks.cancel_scope.cancel()
        finally:
            self.serving = False
        await self.listener.aclose(GRACE)
        counts = self.core.counts + self.counts
        log.info("stopped", **{name.replace(" ", "_"): count for name, count in sorted(counts.items())})

    def stop(self) -> None:
        """Drain, then end `serve`."""
        self._stopping.set()

    def look(self) -> Snapshot:
        """What there is now, seen from outside."""
        taken = snapshot(self.core, self.clock.now(), self._began)
        return replace(taken, counts=dict(sorted((self.core.counts + self.counts).items())))

    async def _drain(self) -> None:
        log.info("draining", grace=self.grace, runs=len(self.core.runs), queued=len(self.core.queue))
        self._send(self._inputs.drain("the coordinator is stopping", self.clock.now()))
        self._flush()
        until = self.clock.now() + self.grace
        while (hosts := self._hosts()) and self.clock.now() < until:
            await self.clock.sleep_until(min(until, self.clock.now() + MOMENT))
        for name in hosts:
            log.warning("not waited for any longer", member=name)
        self._send(self._inputs.close(self.clock.now()))
        self._flush()

    def _hosts(self) -> list[PeerName]:
        return [name for name, peer in self.core.roster.peers.items() if peer.hello.role == Role.HOST]

    async def _read(self) -> None:
        while True:
            burst = await self.listener.receive_many()
            now = self.clock.now()
            for arrival in burst:
                self._arrived(arrival, now)
            self._flush()
            while self.stuck:  # until `_watch` could write
                await self.clock.sleep_until(self.clock.now() + TICK)

    async def _watch(self) -> None:
        due = self.clock.now() + TICK
        listens_until = 0.0
        while True:
            await self.clock.sleep_until(due)
            now = self.clock.now()
            if now - due >= LATE:
                listens_until = now + self.core.lease
            if self.stuck:
                self._flush()
            elif now >= listens_until:
                before = {**self.core.roster.peers, **self.core.roster.away}
                self._send(self._inputs.tick(now))
                self._flush()
                self._fence(before)
                if self._arrays is not None:
                    self._arrays.sweep(self.core.turns.tables)
            if self.access is not None:
                self.refusals.update(self.access.newly_refused())
            due = now + TICK

    def _fence(self, before: Iterable[PeerName]) -> None:
        """Whoever the core gave up is a stranger from now on, even if it wakes up again. `before`: who was there, reachable or not."""
        there = {**self.core.roster.peers, **self.core.roster.away}
        for name in [name for name in before if name not in there]:
            log.warning("lost", member=name, why="its lease ended")
            if name in self.keys:
                del self.names[self.keys.pop(name)]

    def _arrived(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, Disconnected):
            self._closed(arrival.peer, now)
            return
        if isinstance(arrival, Unfit):
            self._refuse(arrival.peer, "frame", arrival.reason, arrival.why)
            return
        key, data = arrival
        self.messages += 1
        try:
            message = decode(data, Heard)
        except WireError as error:
            self._refuse(key, "frame", str(error), "malformed")
            return
        unfit = self.access.why_not(key, message) if self.access is not None else ""
        if unfit:
            self._refuse(key, type(message).__name__, unfit, "not with this key")
            return
        if isinstance(message, Watch | Drain):
            self._asked(key, message)
            return
        name = self.names.get(key)
        if name is not None and name not in self.core.roster.peers:
            del self.names[key], self.keys[name]
            name = None
        if self._arrays is not None:
            message = self._arrays.strip(message)
        if name is not None:
            self._step(name, message, now)
        elif isinstance(message, Hello):
            self._join(key, message, now)
        else:
            self._refuse(key, type(message).__name__, "you are no member; say Hello first", "not a member")

    def _closed(self, key: PeerKey, now: float, why: str = "its connection was closed") -> None:
        name = self.names.pop(key, None)
        if name is None:
            return
        del self.keys[name]
        peer = self.core.roster.peers.get(name)
        if peer is not None:
            log.warning("unreachable", member=name, why=why)
            self._send(self._inputs.part(name, now))
            self._gone(now)

    def _ended(self) -> None:
        """A process of this machine has ended."""
        self._gone(self.clock.now())
        self._flush()

    def _gone(self, now: float) -> None:
        """Give up every member whose connection was closed and who is known not to come back."""
        for name, peer in tuple(self.core.roster.peers.items()):
            why = self._why_gone(peer.hello) if peer.closed is not None else ""
            if why:
                log.warning("lost", member=name, why=why)
                self._send(self._inputs.lose(name, why, now))

    def _why_gone(self, hello: Hello) -> str:
        if self.deaths is not None and self.deaths.ended(hello):
            return f"its process {hello.pid} has ended"
        if self.access is not None and self.access.forgotten(hello):
            return "its key is not authorized any more"
        return ""

    def _asked(self, key: PeerKey, message: ToDaemon) -> None:
        """By anybody whose key allows it; a member is what it said it is. The core and its journal hear nothing of it."""
        member = self.core.roster.peers.get(self.names.get(key, PeerName("")))
        if member is not None and type(message) not in ASKS[member.hello.role]:
            why = f"{member.hello.name} is a {member.hello.role} and may not send this"
            self._refuse(key, type(message).__name__, why, "not allowed")
        elif isinstance(message, Watch):
            self._outgoing.append((key, status_of(self.look())))
        else:
            who = self.access.identity(key) if self.access is not None else ""
            log.warning("told to drain", by=who or "somebody of this machine")
            self._outgoing.append((key, Draining(self.core.draining or "an operator has told the coordinator to stop")))
            self.stop()

    def _step(self, name: PeerName, message: ToCoordinator, now: float) -> None:
        kind = type(message)
        if kind is Heartbeat:
            self._send([(name, Welcome(self.core.name, self.core.epoch, self.core.lease))])
        if kind in events.HEARD:
            self._write(events.heard(name, message))
        sends = self._inputs.step(name, message, now)
        for _, answer in sends:
            if isinstance(answer, REFUSALS):
                why = "draining" if self.core.draining in answer.reason and self.core.draining else "not allowed"
                self.refusals[kind.__name__, why] += 1
                self._write(events.refused(name, message, answer))
        self._send(sends)
        if self._arrays is not None and isinstance(message, OpenTurn | Generated):
            turn = message.turn
            self._arrays.settle(turn, self.core.turns.tables.get((turn.run, turn.episode)))
        if kind is Bye:
            self.names.pop(self.keys.pop(name), None)

    def _join(self, key: PeerKey, hello: Hello, now: float) -> None:
        try:
            sends = self._inputs.join(hello, now)
        except MemberRefused as error:
            self._refuse(key, "Hello", str(error), "not welcome")
            return
        self.names.pop(self.keys.pop(hello.name, key), None)  # it may have come back over another connection
        self.names[key] = hello.name
        self.keys[hello.name] = key
        if self.deaths is not None:
            self.deaths.follow(hello)
        log.info("joined", member=hello.name, role=str(hello.role), pid=hello.pid, workers=len(hello.workers))
        self._send(sends)

    def _refuse(self, key: PeerKey, what: str, reason: str, why: str) -> None:
        self.counts[f"refused {what}"] += 1
        self.refusals[what, why] += 1
        log.warning("refused", what=what, member=self.names.get(key, "unknown"), reason=reason)
        self._outgoing.append((key, Refused(what, reason, stranger=why == "not a member")))

    def _send(self, sends: Sends) -> None:
        for name, message in sends:
            key = self.keys.get(name)
            if key is None:
                self.counts["undeliverable"] += 1
                continue
            if type(message) in events.TOLD:
                self._write(events.told(name, message))
                if isinstance(message, Opened):
                    self.on_opened(message)
            try:
                self._outgoing.append((key, self._arrays.fill(message) if self._arrays is not None else message))
            except Missing as error:  # it is asked for again
                self._undeliverable(name, message, str(error))

    def _flush(self) -> None:
        """Send what a whole burst made us say at once, to each peer in one piece: sent one by one, each message would wake ZeroMQ's thread
        and be a packet. What made us say it is in the journal before."""
        try:
            self._inputs.commit()
        except JournalError as error:
            if not self.stuck:
                log.error("journal is stuck", why=str(error))
            self.stuck = str(error)
            return
        self.stuck = ""
        outgoing, self._outgoing = self._outgoing, []
        by_peer: dict[PeerKey, list[object]] = {}
        for key, message in outgoing:
            by_peer.setdefault(key, []).append(message)
        for key, messages in by_peer.items():
            self._send_to(key, messages)

    def _send_to(self, key: PeerKey, messages: list[object]) -> None:
        """In this order. What cannot be sent is counted and named."""
        if any(type(each) is Opened and (each.phase, each.edge) in LOAD_WITH for each in messages):
            messages.append(CoordinatorLoad(self.cpu() - self._cpu_before, self.core.counts["turns"], self.messages))
        frames: list[bytes] = []
        sent: list[object] = []
        for message in messages:
            try:
                frames.append(encode(message))
                sent.append(message)
            except WireError as error:
                self._undeliverable(self.names.get(key, PeerName("unknown")), message, str(error))
        slow = False
        try:
            taken, why = self.listener.send_many(key, frames), "it does not read, and its queue is full"
            slow = taken < len(frames)
        except PeerGone as error:
            taken, why = 0, str(error)
        for message in sent[taken:]:
            self._undeliverable(self.names.get(key, PeerName("unknown")), message, why)
        if slow:  # nobody knows what it has missed: it must join anew, and is told everything again
            self._closed(key, self.clock.now(), "it does not read what it is sent")

    def _undeliverable(self, name: PeerName, message: object, why: str) -> None:
        self.counts["undeliverable"] += 1
        log.warning("undeliverable", member=name, message=type(message).__name__, why=why)

    def _write(self, event: events.Event | None) -> None:
        if event is not None:
            write = log.warning if event.level == "warning" else log.info
            write(event.name, **event.fields)
