"""A client whose messages, coordinator or connection are lost: it asks again, joins anew, and gives up only when its patience ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import anyio
import pytest

from tinker.client import Client, ClientError, CoordinatorLost, RunOver
from tinker.protocol import ToCoordinator
from tinker.protocol.operations import OptimStep
from tinker.protocol.to_any import Refused, Welcome
from tinker.protocol.to_coordinator import (
    Arrive,
    Enlist,
    EpisodeEnded,
    Heartbeat,
    Hello,
    InHand,
    OpenTurn,
    Operate,
    Played,
    RunSpec,
    Submit,
)
from tinker.protocol.to_host import (
    Admitted,
    Delivered,
    Enlisted,
    MayUpdate,
    Opened,
    OperationDone,
    Play,
    Queued,
    RunStopped,
    Settled,
    TurnClosed,
    UpdateEnded,
)
from tinker.protocol.values import (
    AdamSpec,
    AgentName,
    BlobRef,
    Dealt,
    Edge,
    Ended,
    EpisodeId,
    ModelCard,
    OpId,
    PeerName,
    Phase,
    PolicyName,
    Role,
    RunId,
    TurnId,
)
from tinker.runtime.clock import ManualClock
from tinker.runtime.codec import decode, encode
from tinker.runtime.transport import MemoryNetwork

RUN, A = RunId("run"), AgentName("a")
SPEC = RunSpec(RUN, "test", (), 1, 2, 1, 0, 0)
HELLO = Hello(Role.HOST, PeerName("host"), "here", 1)
EPISODES = tuple(EpisodeId(1, Phase.ROLLOUT, index) for index in range(2))
ADMITTED = Admitted(RUN, ModelCard("m", "m", "t", 9, 9, (0,)), b"", "", "here")


def arrive(phase: Phase, edge: Edge) -> Arrive:
    return Arrive(RUN, 1, phase, edge, A, 0)


def opened(phase: Phase, edge: Edge) -> Opened:
    return Opened(RUN, 1, phase, edge, (A,), (0.0,), (PolicyName("p"),), (0,))


@dataclass
class Desk:
    """The coordinator's end, played by hand. `answers`: what the client was told by the calls it awaits."""

    client: Client
    network: MemoryNetwork
    clock: ManualClock
    tasks: anyio.abc.TaskGroup
    events: list[Any]
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = self.network.listen("coordinator")
        self.arrived: list[Any] = []
        self.tasks.start_soon(self.read)

    async def read(self) -> None:
        while True:
            for arrival in await self.listener.receive_many():
                assert isinstance(arrival, tuple)
                self.key = arrival[0]
                self.arrived.append(decode(arrival[1], ToCoordinator))

    async def heard(self, *ignored: type[Any]) -> list[Any]:
        """Everything that has arrived since the last time."""
        await anyio.wait_all_tasks_blocked()
        found, self.arrived = self.arrived, []
        return [each for each in found if not isinstance(each, ignored)]

    async def tell(self, *messages: object) -> None:
        for message in messages:
            self.listener.send(self.key, encode(message))
        await anyio.wait_all_tasks_blocked()

    async def welcome(self, epoch: int = 1) -> None:
        (hello,) = await self.heard()
        assert isinstance(hello, Hello)
        await self.tell(Welcome(PeerName("coordinator"), epoch, 15.0))

    async def pass_time(self, seconds: float) -> None:
        """Second by second, so that nobody wakes late."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            await anyio.wait_all_tasks_blocked()

    def await_(self, call: Any) -> None:
        """Keep what it returns or raises."""

        async def run() -> None:
            try:
                self.answers.append(await call)
            except ClientError as error:
                self.answers.append(error)

        self.tasks.start_soon(run)


@asynccontextmanager
async def desk(**options: Any) -> AsyncIterator[Desk]:
    network, clock, events = MemoryNetwork(), ManualClock(), []  # type: ignore[var-annotated]
    client = Client(network.connect("coordinator"), HELLO, clock, events.append, **options)
    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.serve)
        yield Desk(client, network, clock, tasks, events)
        tasks.cancel_scope.cancel()


TURN = OpenTurn(TurnId(RUN, EPISODES[0], 0), (), 20.0)
OPERATE = Operate(RUN, OpId("op"), A, PolicyName("p"), OptimStep(AdamSpec(1.0)))


async def test_hello_is_said_again_until_it_is_welcomed() -> None:
    async with desk() as here:
        assert await here.heard() == [HELLO]
        await here.pass_time(7)
        assert await here.heard() == [HELLO, HELLO]  # after 2 and 6 seconds
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        assert await here.client.joined() == Welcome(PeerName("coordinator"), 1, 15.0)


async def test_what_is_awaited_is_asked_again_with_growing_pauses_until_it_is_answered() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.turn(TURN))
        here.await_(here.client.operate(OPERATE))
        times: dict[type[Any], list[int]] = {OpenTurn: [], Operate: []}
        for second in range(40):
            for message in await here.heard(Heartbeat):
                times[type(message)].append(second)
            await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))  # it is not silent
            await here.pass_time(1)
        for asked in times.values():
            pauses = [after - before for before, after in pairwise(asked)]
            assert all(
                0.75 * about <= pause <= 1.25 * about + 1 for about, pause in zip((2, 4, 8, 10), pauses, strict=False)
            )
            assert len(pauses) >= 4
        assert times[OpenTurn] != times[Operate]  # nobody asks in step
        closed, done = TurnClosed(TURN.turn, ()), OperationDone(RUN, OpId("op"), None)  # type: ignore[arg-type]
        del done
        await here.tell(closed, closed)
        await here.pass_time(30)
        assert not [each for each in await here.heard() if isinstance(each, OpenTurn)]
        assert here.answers == [closed]


async def test_a_silent_coordinator_is_asked_one_question_at_a_time_in_turn() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.turn(TURN))
        here.await_(here.client.operate(OPERATE))
        await here.heard()
        await here.pass_time(40)
        asked = [each for each in await here.heard() if not isinstance(each, Heartbeat)]
        assert asked == [TURN, OPERATE, TURN, OPERATE, TURN][: len(asked)] and len(asked) >= 3
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        assert await here.heard() == [TURN, OPERATE]


async def test_who_is_told_that_it_is_no_member_joins_anew_and_asks_everything_again_in_order() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.submit(SPEC))
        await here.heard()
        await here.tell(ADMITTED)
        await here.client.arrive(arrive(Phase.ROLLOUT, Edge.START))
        await here.heard()
        await here.tell(
            opened(Phase.ROLLOUT, Edge.START), *(Play(RUN, 1, Phase.ROLLOUT, k, (EPISODES[k],)) for k in (0, 1))
        )
        ended = EpisodeEnded(RUN, EPISODES[1], Ended.FINISHED)
        here.client.account(ended)
        here.await_(here.client.turn(TURN))
        here.await_(here.client.operate(OPERATE))
        assert await here.heard() == [ended, TURN, OPERATE]
        stranger = Refused("Heartbeat", "you are no member", stranger=True)
        await here.tell(stranger, stranger)
        (hello,) = await here.heard()
        assert isinstance(hello, Hello) and hello.incarnation == 1
        await here.tell(Welcome(PeerName("coordinator"), 2, 15.0))
        in_hand = InHand(RUN, (Dealt(1, Phase.ROLLOUT, 0),))
        assert await here.heard() == [ended, in_hand, TURN, OPERATE]


async def test_nothing_is_sent_before_we_are_a_member() -> None:
    async with desk() as here:
        here.await_(here.client.submit(SPEC))
        assert await here.heard() == [HELLO]
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        assert await here.heard() == [Submit(SPEC)]


async def test_a_coordinator_of_a_lower_epoch_is_not_heard() -> None:
    """Case 22."""
    async with desk() as here:
        await here.welcome(epoch=5)
        here.await_(here.client.turn(TURN))
        await here.heard()
        closed = TurnClosed(TURN.turn, ())
        await here.tell(Welcome(PeerName("coordinator"), 4, 15.0), closed, RunStopped(RUN, "old"))
        assert here.answers == []
        await here.tell(Welcome(PeerName("coordinator"), 5, 15.0), closed)
        assert here.answers == [closed]


async def test_what_is_lost_of_a_deal_comes_again_when_we_say_what_is_in_hand() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.submit(SPEC))
        await here.heard()
        await here.tell(ADMITTED)
        start = arrive(Phase.ROLLOUT, Edge.START)
        await here.client.arrive(start)
        here.await_(here.client.opened(1, Phase.ROLLOUT, Edge.START))
        await here.tell(opened(Phase.ROLLOUT, Edge.START), Play(RUN, 1, Phase.ROLLOUT, 1, (EPISODES[1],)))
        await here.heard()
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        assert await here.heard(Heartbeat) == [InHand(RUN, (Dealt(1, Phase.ROLLOUT, 1),))]
        ended = EpisodeEnded(RUN, EPISODES[1], Ended.FINISHED)
        here.client.account(ended)
        assert await here.heard(Heartbeat) == [ended]
        plays = [Play(RUN, 1, Phase.ROLLOUT, k, (EPISODES[k],)) for k in (0, 1)]
        await here.tell(opened(Phase.ROLLOUT, Edge.START), *plays)
        assert await here.heard(Heartbeat) == [ended]  # we were told to play what we have accounted for
        assert [here.client.plays.receive_nowait().group for _ in range(2)] == [1, 0]
        with pytest.raises(anyio.WouldBlock):  # each group once
            here.client.plays.receive_nowait()


async def test_the_first_account_of_an_episode_is_the_one_that_is_said_again() -> None:
    async with desk() as here:
        await here.welcome()
        first = EpisodeEnded(RUN, EPISODES[0], Ended.FINISHED)
        here.client.account(first)
        here.client.account(EpisodeEnded(RUN, EPISODES[0], Ended.FAILED, "another host's"))
        assert await here.heard() == [first, first]


ENLIST = Enlist(RUN, "test", 2)
ENLISTED = Enlisted(RUN, PeerName("learner"), b"", ADMITTED.model, b"", "", "")
DEAL = Dealt(1, Phase.ROLLOUT, 0)
PLAYED = Played(RUN, DEAL, (EPISODES[0],), BlobRef("b", "d", 1, "here", "/b", ""))


@asynccontextmanager
async def enlisted() -> AsyncIterator[Any]:
    """The desk of a further host, which is dealt one group."""
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.enlist(ENLIST))
        assert await here.heard() == [ENLIST]
        await here.tell(ENLISTED, Play(RUN, 1, Phase.ROLLOUT, 0, (EPISODES[0],)))
        assert here.answers == [ENLISTED]
        yield here


async def test_what_a_further_host_has_played_is_said_again_until_it_is_settled() -> None:
    async with enlisted() as here:
        here.client.deliver(PLAYED)
        assert await here.heard() == [PLAYED]
        await here.pass_time(1)
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        assert {*await here.heard(Heartbeat)} == {InHand(RUN, (DEAL,)), PLAYED}
        await here.tell(Settled(RUN, (DEAL,)))
        await here.pass_time(3)
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(3)
        assert {*await here.heard(Heartbeat)} == {InHand(RUN, ())}
        here.client.deliver(PLAYED)
        assert await here.heard() == []


async def test_a_further_host_enlists_anew_when_the_coordinator_has_lost_it() -> None:
    async with enlisted() as here:
        await here.tell(Refused("InHand", "enlist first"))
        assert await here.heard() == [ENLIST]
        await here.tell(Refused("Heartbeat", "you are no member", stranger=True))
        await here.heard()
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        assert await here.heard() == [ENLIST, InHand(RUN, (DEAL,))]


async def test_a_further_host_hears_of_the_end_of_its_own_run_only() -> None:
    async with enlisted() as here:
        here.await_(here.client.turn(TURN))
        await here.tell(RunStopped(RunId("another"), "why"))
        assert here.answers == [ENLISTED]
        await here.tell(RunStopped(RUN, "its learner host has ended it", True))
        (_, error) = here.answers
        assert isinstance(error, RunOver)
        assert error.finished


async def test_what_further_hosts_deliver_reaches_the_learner_host_while_the_phase_lasts() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.submit(SPEC))
        await here.tell(ADMITTED, opened(Phase.ROLLOUT, Edge.START))
        delivered = Delivered(RUN, PeerName("ann"), DEAL, PLAYED.episodes, PLAYED.bundle)
        await here.tell(delivered)
        assert here.client.deliveries.receive_nowait() == delivered
        await here.tell(opened(Phase.ROLLOUT, Edge.END), delivered)
        with pytest.raises(anyio.WouldBlock):
            here.client.deliveries.receive_nowait()


async def test_the_gate_and_the_end_of_a_phase_are_asked_for_again() -> None:
    async with desk() as here:
        await here.welcome()
        start, ended = arrive(Phase.UPDATE, Edge.START), EpisodeEnded(RUN, EPISODES[0], Ended.FINISHED)
        here.client.account(ended)
        await here.client.arrive(start)
        await here.heard()
        await here.tell(opened(Phase.UPDATE, Edge.START))
        here.await_(here.client.may_update(1, A))
        here.await_(here.client.opened(1, Phase.ROLLOUT, Edge.END))
        await anyio.wait_all_tasks_blocked()
        await here.pass_time(1)
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        assert await here.heard(Heartbeat) == [start, ended]
        may, end = MayUpdate(RUN, 1, A), opened(Phase.ROLLOUT, Edge.END)
        await here.tell(may, may, end, end)
        assert here.answers == [None, end]
        await here.pass_time(2)
        assert await here.heard(Heartbeat) == []


async def test_where_updates_overlap_their_beginning_and_end_are_asked_for_again() -> None:
    async with desk() as here:
        await here.welcome()
        start, end = arrive(Phase.UPDATE, Edge.START), arrive(Phase.UPDATE, Edge.END)
        here.await_(here.client.begin_update(start))
        await here.heard()
        await here.pass_time(1)
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        assert await here.heard(Heartbeat) == [start]
        may, ended = MayUpdate(RUN, 1, A), UpdateEnded(RUN, 1, A)
        await here.tell(may, may)
        here.await_(here.client.end_update(end))
        await here.heard()
        await here.pass_time(1)
        await here.tell(Welcome(PeerName("coordinator"), 1, 15.0))
        await here.pass_time(1)
        assert await here.heard(Heartbeat) == [end]
        await here.tell(ended, ended, may)
        assert here.answers == [None, None]
        await here.pass_time(2)
        assert await here.heard(Heartbeat) == []


async def test_patience_ends() -> None:
    async with desk(patience=30.0) as here:
        await here.welcome()
        here.await_(here.client.turn(TURN))
        await here.pass_time(29)
        assert here.answers == []
        await here.pass_time(9)
        (error,) = here.answers
        assert isinstance(error, CoordinatorLost) and "not heard for 30 s" in str(error)


async def test_a_refusal_after_a_restart_says_that_it_restarted() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.turn(TURN))
        await here.heard()
        await here.tell(Refused("OpenTurn", "you are no member", stranger=True))
        await here.welcome()
        await here.tell(Refused("Arrive", "host has no run 'run' here"))
        (error,) = here.answers
        assert isinstance(error, CoordinatorLost)
        assert "the coordinator restarted and refused Arrive (host has no run 'run' here)" in str(error)


async def test_refusals_that_nobody_waits_for_end_nothing() -> None:
    async with desk() as here:
        await here.welcome()
        here.await_(here.client.turn(TURN))
        await here.tell(Refused("EpisodeEnded", "late"), Refused("EndRun", "late"))
        assert here.answers == []
        await here.tell(RunStopped(RUN, "why"))
        assert [type(each) for each in here.answers] == [RunOver]


async def test_what_comes_after_the_runs_end_ends_nobody() -> None:
    async with desk() as here:
        await here.welcome()
        await here.tell(RunStopped(RUN, "why"), Play(RUN, 2, Phase.ROLLOUT, 0, EPISODES))
        assert here.client.plays.statistics().current_buffer_used == 0


async def test_the_place_in_the_queue_is_told_when_it_changes() -> None:
    async with desk() as here:
        await here.welcome()
        await here.tell(Queued(RUN, "no task server"), Queued(RUN, "no task server"), Queued(RUN, "no such model"))
        assert [each.reason for each in here.events] == ["no task server", "no such model"]
