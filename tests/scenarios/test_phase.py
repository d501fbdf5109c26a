"""One phase in the learner host's hands: its own episodes and delivered ones, each kept once, and when the phase is over here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from scenarios.phase import PhaseInHand
from tinker.protocol.episodes import Episode, Recording
from tinker.protocol.to_coordinator import EpisodeEnded, OpenTurn
from tinker.protocol.to_host import Delivered, Play, TurnClosed
from tinker.protocol.values import BlobRef, Dealt, Ended, EpisodeId, PeerName, Phase, RunId

RUN = RunId("run")
IDS = tuple(EpisodeId(1, Phase.ROLLOUT, index) for index in range(4))


def episode(id: EpisodeId, by: str, ended: Ended = Ended.FINISHED) -> Episode:
    return Episode(id, 0, ended, (), (), (), Recording("r", id, "s", 1, by, "{}", (), (), ended, ()))


def play(*ids: EpisodeId, attempt: int = 0) -> Play:
    return Play(RUN, ids[0].round, ids[0].phase, 0, ids, attempt)


def delivered(*ids: EpisodeId, digest: str = "d") -> Delivered:
    blob = BlobRef("b", digest, 1, "here", "/b", "")
    return Delivered(RUN, PeerName("ann"), Dealt(ids[0].round, ids[0].phase, 1), ids, blob)


@dataclass
class Wire:
    """What the coordinator says, and `accounts`: what it hears. Episodes that are played here wait for `playing`."""

    accounts: list[EpisodeEnded] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    playing: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.deal, self.plays = anyio.create_memory_object_stream[Play](16)
        self.bring, self.deliveries = anyio.create_memory_object_stream[Delivered](16)

    async def turn(self, message: OpenTurn) -> TurnClosed:
        raise AssertionError(message)

    def account(self, message: EpisodeEnded) -> None:
        self.accounts.append(message)

    async def fetch(self, message: Delivered) -> list[Episode]:
        self.fetched.append(message.bundle.digest)
        await anyio.lowlevel.checkpoint()
        return [episode(id, message.bundle.digest) for id in message.episodes]

    async def one(self, message: Play, id: EpisodeId) -> Episode:
        await self.playing.wait()
        return episode(id, "us")

    def phase(self, total: int, before: Sequence[tuple[int, Phase]] = ()) -> PhaseInHand:
        return PhaseInHand(self, RUN, total, self.fetch, lambda episode: None, before)

    def close(self) -> None:
        for stream in (self.deal, self.plays, self.bring, self.deliveries):
            stream.close()


async def test_own_and_delivered_episodes_make_the_phase_full() -> None:
    wire = Wire()
    wire.playing.set()
    wire.deal.send_nowait(play(*IDS[:2]))
    wire.bring.send_nowait(delivered(*IDS[2:]))
    episodes = await wire.phase(4).play(wire.one)
    assert [(each.episode, each.recording.seed) for each in episodes] == list(
        zip(IDS, ("us", "us", "d", "d"), strict=True)
    )
    assert sorted(each.episode for each in wire.accounts) == list(IDS)
    wire.close()


async def test_what_comes_twice_is_kept_once_and_accounted_for_again() -> None:
    wire = Wire()
    async with anyio.create_task_group() as tasks:
        got: list[list[Episode]] = []

        async def run() -> None:
            got.append(await wire.phase(2).play(wire.one))

        tasks.start_soon(run)
        for digest in ("d", "d", "e"):
            wire.bring.send_nowait(delivered(IDS[0], digest=digest))
        await anyio.wait_all_tasks_blocked()
        assert wire.fetched[0] == "d" and "d" not in wire.fetched[1:], "what is being fetched is not fetched again"
        wire.bring.send_nowait(delivered(IDS[0]))
        await anyio.wait_all_tasks_blocked()
        assert {each.episode for each in wire.accounts} == {IDS[0]}
        assert len(wire.accounts) > 1
        wire.playing.set()
        wire.deal.send_nowait(play(IDS[1]))
    assert [(each.episode, each.recording.seed) for each in got[0]] == [(IDS[0], "d"), (IDS[1], "us")]
    wire.close()


async def test_an_episode_that_was_dealt_to_us_and_is_delivered_after_all_is_played_no_further() -> None:
    wire = Wire()
    async with anyio.create_task_group() as tasks:
        got: list[list[Episode]] = []

        async def run() -> None:
            got.append(await wire.phase(1).play(wire.one))

        tasks.start_soon(run)
        wire.deal.send_nowait(play(IDS[0], attempt=1))
        await anyio.wait_all_tasks_blocked()
        wire.bring.send_nowait(delivered(IDS[0]))
    assert [each.recording.seed for each in got[0]] == ["d"]
    wire.close()


async def test_what_belongs_to_a_phase_before_is_not_played() -> None:
    wire = Wire()
    wire.playing.set()
    wire.deal.send_nowait(play(EpisodeId(1, Phase.EVALUATE, 0)))
    wire.bring.send_nowait(delivered(EpisodeId(1, Phase.EVALUATE, 1)))
    wire.deal.send_nowait(play(IDS[0]))
    episodes = await wire.phase(1, [(1, Phase.EVALUATE)]).play(wire.one)
    assert [each.episode for each in episodes] == [IDS[0]]
    assert wire.fetched == []
    wire.close()


async def test_when_we_stop_other_hosts_are_not_waited_for() -> None:
    wire = Wire()
    phase = wire.phase(4)
    async with anyio.create_task_group() as tasks:
        got: list[list[Episode]] = []

        async def run() -> None:
            got.append(await phase.play(wire.one))

        tasks.start_soon(run)
        wire.deal.send_nowait(play(IDS[0]))
        await anyio.wait_all_tasks_blocked()
        phase.stop()
        await anyio.wait_all_tasks_blocked()
        assert got == [], "what is played here is waited for"
        wire.playing.set()
    assert [each.episode for each in got[0]] == [IDS[0]]
    wire.close()
