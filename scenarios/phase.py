"""One phase in the learner host's hands: episodes it plays itself, and those further hosts deliver, each kept and accounted for once.

Whatever comes first of an episode counts; what comes again (it was dealt anew, or delivered twice) is only accounted for again. The phase
is over here when every episode of it is in, or when nothing more will come: it was left out, the run is over, or we stop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from tinker.client import CoordinatorLost, RunOver
from tinker.protocol.episodes import Episode
from tinker.protocol.to_coordinator import EpisodeEnded, OpenTurn
from tinker.protocol.to_host import Delivered, Play, TurnClosed
from tinker.protocol.values import EpisodeId, Phase, RunId

MOMENT = 1.0  # seconds that an episode has to hear at its next turn that its run is over
FETCHES = 8  # deliveries that are fetched at the same time

Fetch = Callable[[Delivered], Awaitable[list[Episode]]]
PlayOne = Callable[[Play, EpisodeId], Awaitable[Episode]]


class Runtime(Protocol):
    """What a host needs of its connection (`tinker.client.Client`)."""

    @property
    def plays(self) -> MemoryObjectReceiveStream[Play]: ...

    @property
    def deliveries(self) -> MemoryObjectReceiveStream[Delivered]: ...

    async def turn(self, message: OpenTurn) -> TurnClosed: ...

    def account(self, message: EpisodeEnded) -> None: ...


async def no_fetch(delivered: Delivered) -> list[Episode]:
    """For a host that nobody delivers to."""
    raise ValueError(f"{delivered.host} has delivered episodes, and nobody here fetches them")


@dataclass(slots=True)
class PhaseInHand:
    """See the module. `fetch` returns what it could get of a delivery; the rest is delivered again. `before`: phases that are
    over, of which nothing counts any more."""

    runtime: Runtime
    run: RunId
    total: int
    fetch: Fetch
    on_done: Callable[[Episode], None]
    before: Collection[tuple[int, Phase]] = ()
    _episodes: dict[EpisodeId, Episode] = field(default_factory=dict)
    _playing: dict[str, anyio.CancelScope] = field(default_factory=dict)
    _fetching: set[str] = field(default_factory=set)
    _no_more: bool = False
    _dropped: bool = False
    _complete: anyio.Event = field(default_factory=anyio.Event)

    def stop(self) -> None:
        """Nothing more is waited for but what is being played here."""
        self._no_more = True
        self._look()

    async def play(
        self, one: PlayOne, left_out: Callable[[], Awaitable[Collection[str]]] | None = None
    ) -> list[Episode]:
        """Until the phase is over here; the episodes in order of their index."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hand_out, one, tasks, name="hand out")
            tasks.start_soon(self._take_deliveries, tasks, name="take deliveries")
            if left_out is not None:
                tasks.start_soon(self._give_up, left_out, name="give up what is dropped")
            await self._complete.wait()
            tasks.cancel_scope.cancel()
        with suppress(
            anyio.WouldBlock, anyio.EndOfStream
        ):  # what was handed out and is dropped is not played in the next phase
            while True:
                self.runtime.plays.receive_nowait()
        return [self._episodes[key] for key in sorted(self._episodes)]

    # --- our own ---

    async def _hand_out(self, one: PlayOne, tasks: TaskGroup) -> None:
        with suppress(anyio.EndOfStream):  # the run is over; whoever waits for the barrier is told why
            while True:
                play = await self.runtime.plays.receive()
                if self._dropped or (play.round, play.phase) in self.before:
                    continue
                for episode in play.episodes:
                    if episode in self._episodes:  # its host had delivered it before it was lost
                        self._keep(self._episodes[episode])
                    else:
                        scope = self._playing[str(episode)] = anyio.CancelScope()
                        tasks.start_soon(self._play, one, play, episode, scope, name=f"episode {episode}")
        self.stop()

    async def _play(self, one: PlayOne, play: Play, episode: EpisodeId, scope: anyio.CancelScope) -> None:
        with scope:
            self._keep(await one(play, episode))
        del self._playing[str(episode)]
        self._look()

    async def _give_up(self, left_out: Callable[[], Awaitable[Collection[str]]]) -> None:
        try:
            dropped = await left_out()
        except (RunOver, CoordinatorLost):  # so do those who wait for a turn, and the others await what may never come
            await anyio.sleep(MOMENT)
            dropped = tuple(self._playing)
        self._dropped = True
        for episode in dropped:
            if episode in self._playing:
                self._playing[episode].cancel()
        self.stop()

    # --- other hosts' ---

    async def _take_deliveries(self, tasks: TaskGroup) -> None:
        at_once = anyio.CapacityLimiter(FETCHES)
        with suppress(anyio.EndOfStream):
            while True:
                delivered = await self.runtime.deliveries.receive()
                if (delivered.deal.round, delivered.deal.phase) in self.before:
                    continue
                for episode in delivered.episodes:
                    if episode in self._episodes:
                        self._keep(self._episodes[episode])
                missing = [each for each in delivered.episodes if each not in self._episodes]
                if missing and delivered.bundle.digest not in self._fetching:
                    self._fetching.add(delivered.bundle.digest)
                    tasks.start_soon(self._take, delivered, at_once, name=f"take from {delivered.host}")

    async def _take(self, delivered: Delivered, at_once: anyio.CapacityLimiter) -> None:
        try:
            async with at_once:
                episodes = await self.fetch(delivered)
        finally:
            self._fetching.discard(delivered.bundle.digest)
        for episode in episodes:
            if episode.episode in delivered.episodes:
                self._keep(episode)
            if str(episode.episode) in self._playing:  # it was dealt to us meanwhile
                self._playing[str(episode.episode)].cancel()

    # --- both ---

    def _keep(self, episode: Episode) -> None:
        """Account for it; the first of an episode counts."""
        first = self._episodes.setdefault(episode.episode, episode)
        reason = first.recording.reason
        self.runtime.account(EpisodeEnded(self.run, first.episode, first.ended, reason[-500:]))
        if first is episode:
            self.on_done(episode)
        self._look()

    def _look(self) -> None:
        if len(self._episodes) >= self.total or (self._no_more and not self._playing):
            self._complete.set()
