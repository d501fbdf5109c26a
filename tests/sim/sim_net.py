"""The simulated network: a `Transport` for each process, with latency, loss, duplication, reordering, cuts and disconnects by seed.

Order is kept within a connection, as the transport promises, and not across connections, unless the weather says otherwise. A frame
towards a frozen process arrives and waits in its inbox; what is under way to or from a killed one is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim_loop import SimLoop

from tinker.runtime.transport.inbox import Inbox
from tinker.runtime.transport.interface import (
    BURST,
    DEFAULT_LIMITS,
    AddressInUse,
    Arrival,
    Closed,
    Disconnected,
    Limits,
    PeerGone,
    PeerKey,
    PeerSlow,
)

RECONNECT = (0.05, 0.5)  # seconds until a broken connection is made again

Tap = Callable[[str, str, bytes], None]  # sender, receiver, frame


@dataclass(slots=True)
class Weather:
    """What happens to frames now. `latency`: seconds, from and to; the rest are probabilities of each frame."""

    latency: tuple[float, float] = (0.001, 0.01)
    spike: float = 0.0  # the frame needs up to 3 s, and so do those behind it
    loss: float = 0.0
    duplicate: float = 0.0
    overtake: float = 0.0  # the frame arrives before others of its connection


class SimNetwork:
    """All listeners and connections of one simulation. `sent` and `arrived` are told of every frame. `every`: frames of a connection in
    one direction of which the last is lost, always (0: none), as if to spite whoever sends in step."""

    def __init__(self, loop: SimLoop, seed: int, sent: Tap, arrived: Tap) -> None:
        self.loop = loop
        self.rng = random.Random(f"network {seed}")
        self.weather = Weather()
        self.every = 0
        self.sent = sent
        self.arrived = arrived
        self.digest = hashlib.blake2b(digest_size=8)
        self.did: Counter[str] = Counter()
        self.cuts: set[tuple[str, str]] = set()
        self.dead: set[str] = set()
        self.listeners: dict[str, SimListener] = {}
        self.links: dict[PeerKey, SimConnection] = {}
        self.story: deque[tuple[float, str, str, bytes, str]] = deque(maxlen=400)

    def transport(self, process: str) -> SimTransport:
        return SimTransport(self, process)

    # --- faults ---

    def cut(self, sender: str, receiver: str) -> None:
        """Frames in this direction stand still until `heal`."""
        self.cuts.add((sender, receiver))

    def heal(self, sender: str, receiver: str) -> None:
        self.cuts.discard((sender, receiver))
        for link in self.links.values():
            link.up.pump()
            link.down.pump()

    def clear(self, but: frozenset[tuple[str, str]] = frozenset()) -> None:
        """The faults are over, but for these cuts."""
        self.weather = Weather()
        for each in sorted(self.cuts - but):
            self.heal(*each)

    def disconnect(self, link: SimConnection, *, told: bool) -> None:
        """The connection breaks and is made again soon: what is under way is lost, and the listener may hear of it or not."""
        self.did[f"disconnect {'told' if told else 'untold'}"] += 1
        self.did["frames lost with a connection"] += link.up.drop() + link.down.drop()
        link.away = self.loop.time() + self.rng.uniform(*RECONNECT)
        self.loop.at(link.away, link.flush)
        listener = self.listeners.get(link.address)
        if told and listener is not None:
            listener.lost(link.key)

    def kill(self, process: str) -> None:
        """The process is gone. Its peers hear of it if their machines notice."""
        self.dead.add(process)
        told = self.rng.random() < 0.7
        for listener in [each for each in self.listeners.values() if each.process == process]:
            del self.listeners[listener.address]
            for link in self.links.values():
                if link.address == listener.address:
                    self.did["frames lost with a listener"] += link.up.drop() + link.down.drop()
        for link in [each for each in self.links.values() if each.process == process]:
            link.down.drop()
            self.forget(link, after=self.rng.uniform(0.001, 0.1), told=told)

    def forget(self, link: SimConnection, after: float, *, told: bool) -> None:
        """The connecting end is gone; frames it sent still arrive, then the listener is told."""
        self.links.pop(link.key, None)
        listener = self.listeners.get(link.address)
        if listener is not None and told:
            end = max(self.loop.time() + after, link.up.last) + 1e-6
            self.loop.at(end, listener.lost, link.key)

    def trace(self, sender: str, receiver: str, data: bytes, what: str) -> None:
        now = self.loop.time()
        self.digest.update(b"%a %a %a %a" % (now, sender, receiver, what))
        self.digest.update(data)
        self.story.append((now, sender, receiver, data, what))


class Stream:
    """A channel that moves: gives every frame its time of arrival, and hands over what has arrived."""

    def __init__(self, net: SimNetwork, sender: str, receiver: str, deliver: Callable[[bytes], None]) -> None:
        self.sender = sender
        self.receiver = receiver
        self.last = 0.0
        self._net = net
        self._deliver = deliver
        self._frames: list[tuple[float, bytes]] = []
        self._carried = 0
        self._broken = 0  # how often the connection broke: what travels on it goes with it

    def __len__(self) -> int:
        return len(self._frames)

    def carry(self, data: bytes) -> None:
        net = self._net
        net.sent(self.sender, self.receiver, data)
        net.trace(self.sender, self.receiver, data, "sent")
        weather, rng = net.weather, net.rng
        self._carried += 1
        if rng.random() < weather.loss or (net.every and self._carried % net.every == 0):
            net.did["frames lost"] += 1
            net.trace(self.sender, self.receiver, data, "lost")
            return
        self.put(data)
        if rng.random() < weather.duplicate:  # it was sent once more on another way: it may come much later
            net.did["frames duplicated"] += 1
            net.loop.at(net.loop.time() + rng.choice((0.0, 0.05, 2.0)) * rng.random(), self._again, data, self._broken)

    def _again(self, data: bytes, broken: int) -> None:
        net = self._net
        if (self.sender, self.receiver) not in net.cuts and broken == self._broken:
            net.trace(self.sender, self.receiver, data, "arrived again")
            net.arrived(self.sender, self.receiver, data)
            self._deliver(data)

    def put(self, data: bytes) -> None:
        """It is under way, whoever sent it."""
        net = self._net
        weather, rng = net.weather, net.rng
        takes = rng.uniform(*weather.latency)
        if rng.random() < weather.spike:
            net.did["latency spikes"] += 1
            takes += rng.uniform(0.1, 3.0)
        at = net.loop.time() + takes
        if self._frames and rng.random() < weather.overtake:
            net.did["frames that overtook"] += 1
            self._frames.insert(rng.randrange(len(self._frames)), (self._frames[0][0], data))
            return
        self.last = max(self.last, at)
        self._frames.append((self.last, data))
        net.loop.at(self.last, self.pump)

    def pump(self) -> None:
        """Hand over what is there by now."""
        net = self._net
        if (self.sender, self.receiver) in net.cuts:
            if self._frames:
                net.did["frames held by a cut"] += 1
            return
        while self._frames and self._frames[0][0] <= net.loop.time():
            _, data = self._frames.pop(0)
            net.trace(self.sender, self.receiver, data, "arrived")
            net.arrived(self.sender, self.receiver, data)
            self._deliver(data)

    def drop(self) -> int:
        lost = len(self._frames)
        self._frames.clear()
        self._broken += 1
        return lost


class SimTransport:
    """The network as one process has it."""

    def __init__(self, net: SimNetwork, process: str) -> None:
        self._net = net
        self._process = process

    def listen(self, address: str, limits: Limits = DEFAULT_LIMITS) -> SimListener:
        if address in self._net.listeners:
            raise AddressInUse(f"{address} is in use in this simulation")
        listener = SimListener(self._net, self._process, address, limits)
        self._net.listeners[address] = listener
        for link in self._net.links.values():
            if link.address == address:
                self._net.loop.at(self._net.loop.time() + self._net.rng.uniform(*RECONNECT), link.flush)
        return listener

    def connect(self, address: str, limits: Limits = DEFAULT_LIMITS) -> SimConnection:
        number = self._net.did["connections"]
        self._net.did["connections"] += 1
        link = SimConnection(self._net, self._process, address, PeerKey(b"sim-%d" % number), limits)
        self._net.links[link.key] = link
        return link


class SimListener:
    """See `Listener`."""

    def __init__(self, net: SimNetwork, process: str, address: str, limits: Limits) -> None:
        self.address = address
        self.process = process
        self.undeliverable = 0
        self._net = net
        self._limits = limits
        self._closed = False
        self._known: set[PeerKey] = set()
        self._queue: deque[Arrival] = deque()
        self._inbox: Inbox[Arrival] = Inbox(f"the listener at {address}", self._refill)

    async def receive(self) -> Arrival:
        return await self._inbox.one()

    async def receive_many(self) -> list[Arrival]:
        return await self._inbox.many()

    def send(self, peer: PeerKey, data: bytes) -> None:
        if self._closed:
            raise Closed(f"the listener at {self.address} is closed")
        self._limits.check(data)
        if self.process in self._net.dead:
            return
        link = self._net.links.get(peer)
        if peer not in self._known:
            raise PeerGone(f"no peer {peer!r} is connected to {self.address}")
        if link is None or link.away > self._net.loop.time():
            self.undeliverable += 1
            self._net.did["frames to a peer that had gone"] += 1
            return
        if len(link.down) + link.waiting >= self._limits.queue:
            raise PeerSlow(f"too many frames wait for peer {peer!r}: it does not read")
        link.down.carry(data)

    def send_many(self, peer: PeerKey, frames: Sequence[bytes]) -> int:
        for taken, data in enumerate(frames):
            try:
                self.send(peer, data)
            except PeerSlow:
                return taken
        return len(frames)

    def take(self, peer: PeerKey, data: bytes) -> None:
        """From the network."""
        self._known.add(peer)
        self._queue.append((peer, data))
        self._inbox.wake()

    def lost(self, peer: PeerKey) -> None:
        if peer in self._known:
            self._known.discard(peer)
            self._queue.append(Disconnected(peer))
            self._inbox.wake()

    def waiting(self, peer: PeerKey) -> int:
        return 0

    async def aclose(self, grace: float = 0.0) -> int:
        await asyncio.sleep(0)
        self._closed = True
        if self._net.listeners.get(self.address) is self:
            del self._net.listeners[self.address]
        self._inbox.close()
        return 0

    def _refill(self) -> None:
        for _ in range(min(BURST, len(self._queue))):
            self._inbox.arrived.append(self._queue.popleft())


class SimConnection:
    """See `Connection`. Frames wait here while nobody listens, or the connection is broken."""

    def __init__(self, net: SimNetwork, process: str, address: str, key: PeerKey, limits: Limits) -> None:
        self.address = address
        self.process = process
        self.key = key
        self.away = 0.0  # broken until then
        self._net = net
        self._limits = limits
        self._closed = False
        self._unsent: deque[bytes] = deque()
        self._queue: deque[bytes] = deque()
        self._inbox: Inbox[bytes] = Inbox(f"the connection to {address}", self._refill)
        self.up = Stream(net, process, address, self._deliver_up)
        self.down = Stream(net, address, process, self._deliver_down)

    @property
    def waiting(self) -> int:
        """Frames that arrived and were not taken yet."""
        return len(self._queue)

    async def receive(self) -> bytes:
        return await self._inbox.one()

    async def receive_many(self) -> list[bytes]:
        return await self._inbox.many()

    def send(self, data: bytes) -> None:
        if self._closed:
            raise Closed(f"the connection to {self.address} is closed")
        self._limits.check(data)
        if self.process in self._net.dead:
            return
        if len(self._unsent) + len(self.up) >= self._limits.queue:
            raise PeerSlow(f"too many frames wait for {self.address}: it does not read, or nobody listens there")
        self._unsent.append(data)
        self.flush()

    def flush(self) -> None:
        """Send what waits, if somebody listens."""
        if self.address in self._net.listeners and self.away <= self._net.loop.time():
            while self._unsent:
                self.up.carry(self._unsent.popleft())

    async def aclose(self, grace: float = 0.0) -> int:
        """What was sent still arrives; what waits for a listener is waited for as long as `grace` says."""
        if self._closed:
            return 0
        self._closed = True
        self._inbox.close()
        if self._unsent and grace > 0 and self.process not in self._net.dead:
            await asyncio.sleep(grace)
        else:
            await asyncio.sleep(0)
        if self.process not in self._net.dead:
            self._net.forget(self, after=0.001, told=True)
        return len(self._unsent)

    def _deliver_up(self, data: bytes) -> None:
        listener = self._net.listeners.get(self.address)
        if listener is not None:
            listener.take(self.key, data)

    def _deliver_down(self, data: bytes) -> None:
        if not self._closed:
            self._queue.append(data)
            self._inbox.wake()

    def _refill(self) -> None:
        for _ in range(min(BURST, len(self._queue))):
            self._inbox.arrived.append(self._queue.popleft())
