"""A further host: plays the groups it is dealt, of whatever phase, and delivers what it has played. It learns nothing and decides nothing.

A group is in its hands until it is settled. What it is dealt no longer (its connection was lost for too long, the phase was dropped) is
given up where it is; nothing that it still says about it counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from scenarios.host import Host
from tinker.protocol.episodes import Episode
from tinker.protocol.to_host import Play
from tinker.protocol.values import Dealt, Ended, EpisodeId, PolicyName

Deliver = Callable[[Dealt, list[Episode]], Awaitable[None]]


@dataclass(slots=True)
class FurtherHost:
    """`deliver` returns when the episodes are where the learner host finds them, and the coordinator was told. `capacity`: episodes played
    at the same time. `played`: how many there were."""

    host: Host
    deliver: Deliver
    capacity: int
    played: int = 0
    _groups: dict[Dealt, anyio.CancelScope] = field(default_factory=dict)
    _empty: anyio.Event = field(default_factory=anyio.Event)
    _retired: bool = False

    async def serve(self, plays: MemoryObjectReceiveStream[Play]) -> None:
        """Until the stream ends (the run is over), or it has retired and its hands are empty."""
        places = anyio.CapacityLimiter(self.capacity)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hand_out, plays, places, tasks, name="hand out")
            await self._empty.wait()
            tasks.cancel_scope.cancel()

    def retire(self) -> None:
        """What is in hand is the last."""
        self._retired = True
        self._look()

    def settled(self, deals: tuple[Dealt, ...]) -> None:
        """These are over."""
        for deal in deals:
            scope = self._groups.pop(deal, None)
            if scope is not None:
                scope.cancel()
        self._look()

    def _look(self) -> None:
        if self._retired and not self._groups:
            self._empty.set()

    async def _hand_out(
        self, plays: MemoryObjectReceiveStream[Play], places: anyio.CapacityLimiter, tasks: TaskGroup
    ) -> None:
        async for play in plays:
            scope = self._groups[play.deal] = anyio.CancelScope()
            tasks.start_soon(self._group, play, scope, places, name=f"group {play.group}")
        self._empty.set()

    async def _group(self, play: Play, scope: anyio.CancelScope, places: anyio.CapacityLimiter) -> None:
        versions = {PolicyName(each.policy): each.version for each in play.versions}
        send, finished = anyio.create_memory_object_stream[Episode](len(play.episodes))

        async def one(id: EpisodeId) -> None:
            async with places:
                episode = await self.host.episode(id, play.group, versions, play.attempt)
            if episode.ended is not Ended.DROPPED:  # it was not ours any more, or we stop
                send.send_nowait(episode)

        with scope:
            async with send, finished, anyio.create_task_group() as tasks:
                for id in play.episodes:
                    tasks.start_soon(one, id, name=f"episode {id}")
                left = len(play.episodes)
                while left:
                    some = [await finished.receive()]
                    some += [finished.receive_nowait() for _ in range(finished.statistics().current_buffer_used)]
                    await self.deliver(play.deal, some)
                    left -= len(some)
                    self.played += len(some)
