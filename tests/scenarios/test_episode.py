"""How an episode ends, whatever its scenario does, and that one episode's end is nobody else's."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from scenario_fakes import ScriptedTurns, Writer, auction, lines, play, scripted, writers

from agents.players.player import Answer, Need
from scenarios import Dropped, Forfeit, Forfeited, Identity, Limits, Scenario, Scores, Table, play_episode, scenario
from tinker.protocol.episodes import Episode, Trajectory
from tinker.protocol.values import AgentName, Ended, EpisodeId, Phase, PolicyName, SeatName, pack_floats, pack_ids


def duel(function: Callable[..., Awaitable[Any]]) -> Scenario:
    """A throw-away scenario of two seats."""
    function.__doc__ = "A test."
    return scenario("ann", "bob", version=1, name="duel")(function)


def returning(scores: object) -> Scenario:
    async def ends(table: Table) -> Scores:
        return scores  # type: ignore[return-value]

    return duel(ends)


def two() -> dict[SeatName, Any]:
    return scripted(ann=lines("a"), bob=lines("b"))


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.5), 2.5),
        (np.array([4]), 4.0),
        (True, 1.0),
        (-1, -1.0),
    ],
)
async def test_numpy_scores_arrive_as_plain_floats(score: object, expected: float) -> None:
    episode = await play(returning({"bob": score, "ann": 0}), two())
    assert episode.scores == (("ann", 0.0), ("bob", expected))
    assert all(type(value) is float for _, value in episode.scores)


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), np.float32("nan"), 10**400])
async def test_a_score_that_is_no_finite_number_is_left_out_and_counted(score: object) -> None:
    episode = await play(returning({"ann": 1.0, "bob": score}), two())
    assert (episode.ended, episode.scores, episode.bad_scores) == (Ended.FINISHED, (("ann", 1.0),), 1)


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        (None, "returned None"),
        ({"ann": 1.0}, "no score for bob"),
        ({"ann": 1.0, "bob": 1.0, "cleo": 1.0}, "a score for 'cleo'"),
        ({0: 1.0, "ann": 1.0}, "no score for bob and a score for 0"),
        ({"ann": 1.0, "bob": "win"}, "score of seat 'bob' is 'win'"),
        ({"ann": 1.0, "bob": np.array([1, 2])}, "score of seat 'bob' is array"),
    ],
)
async def test_wrong_scores_fail_the_episode_and_are_named(scores: object, named: str) -> None:
    episode = await play(returning(scores), two())
    assert (episode.ended, episode.scores) == (Ended.FAILED, ())
    assert named in episode.recording.reason


async def test_numpy_measures_arrive_as_plain_floats_and_the_last_one_counts() -> None:
    async def measuring(table: Table) -> Scores:
        table.measure("success", 0)
        table.measure("length", np.int64(3))
        table.measure("success", np.bool_(True))
        return {"ann": 0, "bob": 0}

    episode = await play(duel(measuring), two())
    assert episode.measures == (("success", 1.0), ("length", 3.0))


async def test_a_failed_episode_has_its_traceback_and_its_siblings_go_on() -> None:
    async def merging(table: Table, *, index: int = 0) -> Scores:
        await table.act_all("?", str)
        if index == 5:
            raise ValueError("bad merge")
        return {"ann": index, "bob": 0}

    played = duel(merging)
    episodes: dict[int, Episode] = {}

    async def one(index: int) -> None:
        turns = ScriptedTurns({"ann": lambda context: "a", "bob": lambda context: "b"}, [index, 8 - index])
        episodes[index] = await play_with_index(played, turns, index)

    async with anyio.create_task_group() as group:
        for index in range(8):
            group.start_soon(one, index)
    assert {index for index, episode in episodes.items() if episode.ended is Ended.FAILED} == {5}
    reason = episodes[5].recording.reason
    assert reason.startswith("ValueError: bad merge\n")
    assert 'test_episode.py", line' in reason
    assert "in merging" in reason
    assert "scenarios/episode.py" not in reason


async def play_with_index(played: Scenario, turns: ScriptedTurns, index: int) -> Episode:
    identity = Identity("run", EpisodeId(1, Phase.ROLLOUT, index))
    return await play_episode(
        played,
        writers("ann", "bob"),
        turns,
        identity=identity,
        rng_seed=0,
        params={"index": index},
        clock=lambda: 0.0,
    )


async def test_a_scenario_may_await_foreign_things() -> None:
    async def waiting(table: Table) -> Scores:
        await anyio.lowlevel.checkpoint()
        return {"ann": 0, "bob": 0}

    assert (await play(duel(waiting), two())).ended is Ended.FINISHED


async def test_a_scenario_that_awaits_for_ever_ends_at_its_deadline_and_says_where() -> None:
    async def waiting(table: Table) -> Scores:
        await anyio.sleep_forever()
        return {}

    episode = await play(duel(waiting), two(), limits=Limits(deadline=0.0))
    assert episode.ended is Ended.FAILED
    assert episode.recording.reason.startswith("timeout: not over after its 0 s, at ")
    assert "test_episode.py" in episode.recording.reason


async def test_an_open_turn_that_never_closes_ends_at_the_deadline() -> None:
    class Stuck:
        async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
            await anyio.sleep_forever()
            return {}

    async def asking(table: Table) -> Scores:
        await table.act_all("?", str)
        return {}

    episode = await play(duel(asking), writers("ann", "bob"), Stuck(), limits=Limits(deadline=0.0))  # type: ignore[arg-type]
    assert episode.recording.reason.startswith("timeout:")


@pytest.mark.parametrize("swallowing", [False, True])
async def test_an_episode_that_ends_and_times_out_at_once_timed_out(swallowing: bool) -> None:
    async def ending(table: Table) -> Scores:
        if swallowing:
            with contextlib.suppress(BaseException):
                await anyio.sleep_forever()
        return {"ann": 1.0, "bob": 1.0}

    episode = await play(duel(ending), two(), limits=Limits(deadline=0.0))
    assert (episode.ended, episode.scores) == (Ended.FAILED, ())
    assert episode.recording.reason.startswith("timeout:")


@pytest.mark.parametrize("catching", [False, True])
async def test_an_endless_loop_of_turns_ends_at_max_turns(catching: bool) -> None:
    async def looping(table: Table) -> Scores:
        while True:
            try:
                await table["ann"].act("?", str)
            except Exception:
                if not catching:
                    raise

    episode = await play(duel(looping), two(), limits=Limits(max_turns=7))
    assert episode.ended is Ended.FAILED
    assert episode.recording.reason.startswith("max_turns:")
    assert [line.turn for line in episode.recording.lines if line.kind == "ask"] == list(range(7))


async def test_a_loop_of_scripted_turns_can_be_timed_out() -> None:
    async def looping(table: Table) -> Scores:
        while True:
            await table["ann"].act("?", str)

    episode = await play(duel(looping), two(), limits=Limits(deadline=0.0, max_turns=10**9))
    assert episode.recording.reason.startswith("timeout:")


async def test_cancellation_from_outside_passes_through() -> None:
    done: list[Episode] = []

    async def waiting(table: Table) -> Scores:
        scope.cancel()
        await anyio.sleep_forever()
        return {}

    with anyio.CancelScope() as scope:
        done.append(await play(duel(waiting), two()))
    assert scope.cancelled_caught
    assert not done


async def test_a_keyboard_interrupt_passes_through() -> None:
    async def quitting(table: Table) -> Scores:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await play(duel(quitting), two())


def leave(*ignored: object) -> str:
    raise SystemExit(0)


async def _exits(table: Table) -> None:
    sys.exit(3)


async def _exits_in_its_parser(table: Table) -> None:
    await table["ann"].act("?", leave)


async def _swallows_the_exit_of_a_player(table: Table) -> None:
    with contextlib.suppress(BaseException):
        await table["bob"].act("?", str)


@pytest.mark.parametrize(
    ("exits", "named"),
    [
        (_exits, "SystemExit(3): exit() and sys.exit() end nothing but this episode"),
        (_exits_in_its_parser, "parser of seat 'ann' raised SystemExit"),
        (_swallows_the_exit_of_a_player, "SystemExit(0): exit()"),
    ],
)
async def test_an_exit_fails_the_episode_and_nothing_else(
    exits: Callable[[Table], Awaitable[None]], named: str
) -> None:
    async def quitting(table: Table) -> Scores:
        await exits(table)
        return {"ann": 1.0, "bob": 1.0}

    episode = await play(duel(quitting), scripted(ann=lines("a"), bob=leave))
    assert (episode.ended, episode.scores) == (Ended.FAILED, ())
    assert named in episode.recording.reason
    assert re.search(r'test_episode.py", line \d+, in (leave|_exits)\n', episode.recording.reason)


async def test_an_episode_that_the_runtime_gives_up_is_dropped_even_if_the_scenario_catches_it() -> None:
    class Draining:
        async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
            raise Dropped("the coordinator is draining")

    async def catching(table: Table) -> Scores:
        with contextlib.suppress(Exception):
            await table["ann"].act("?", str)
        return {"ann": 1.0, "bob": 1.0}

    episode = await play(duel(catching), writers("ann", "bob"), Draining())  # type: ignore[arg-type]
    assert (episode.ended, episode.scores) == (Ended.DROPPED, ())
    assert episode.recording.reason == "the coordinator is draining"


async def test_the_environment_raising_is_an_error_without_scores_and_not_a_forfeit() -> None:
    async def asking(table: Table) -> Scores:
        def parse(text: str) -> int:
            raise RuntimeError("the environment broke")

        await table["ann"].act("?", parse)
        return {}

    episode = await play(duel(asking), two())
    assert (episode.ended, episode.scores) == (Ended.FAILED, ())
    assert "the environment broke" in episode.recording.reason
    assert [line.kind for line in episode.recording.lines] == ["ask", "reply"]


async def test_a_scenario_may_declare_a_forfeit_itself_but_only_of_its_seats() -> None:
    async def judging(table: Table, *, seat: str = "bob") -> Scores:
        raise Forfeit(seat, "moved out of turn")

    assert dict((await play(duel(judging), two())).scores) == {"ann": 0.0, "bob": -1.0}
    assert "the seat 'dan'" in (await play(duel(judging), two(), seat="dan")).recording.reason


async def test_parameters_that_are_refused_fail_the_episode() -> None:
    episode = await play(auction, two(), highes=3)
    assert episode.ended is Ended.FAILED
    assert "did you mean 'highest'" in episode.recording.reason


async def test_a_player_that_raises_fails_the_episode_with_its_name() -> None:
    def broken(heard: object, prompt: str, rng: object) -> str:
        raise LookupError("no move left")

    episode = await play(auction, scripted(ann=lines("a"), bob=broken))
    assert episode.ended is Ended.FAILED
    assert "LookupError: no move left" in episode.recording.reason


async def test_players_that_are_not_exactly_the_seats_are_refused() -> None:
    with pytest.raises(ValueError, match="ann, bob; players came for ann"):
        await play(auction, scripted(ann=lines("a")))


async def test_durations_tell_the_scenario_and_its_parsers_from_players_and_turns() -> None:
    now = [0.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    def slow(context: str) -> str:
        passes(100.0)
        return "x"

    async def working(table: Table) -> Scores:
        passes(1.0)
        await table.act_all("?", lambda text: passes(2.0))
        passes(4.0)
        return {"ann": 0, "bob": 0}

    turns = ScriptedTurns({"ann": slow, "bob": slow})
    episode = await play(duel(working), writers("ann", "bob"), turns, clock=lambda: now[0])
    assert (episode.seconds, episode.scenario_seconds) == (209.0, 9.0)


class Learner(Writer):
    """A writer that leaves a trajectory."""

    def __init__(self, seat: str, *, broken: bool = False) -> None:
        super().__init__()
        self._seat = seat
        self._broken = broken

    def trajectory(self) -> Trajectory:
        if self._broken:
            raise ValueError("no tokens")
        return Trajectory(
            SeatName(self._seat),
            AgentName("x"),
            PolicyName("p"),
            pack_ids([]),
            b"",
            pack_floats([]),
            (),
            1.0,
            0,
            retries=0,
            forfeits=0,
        )


async def test_trajectories_are_collected_in_seat_order_with_the_tables_count_of_forfeits() -> None:
    turns = ScriptedTurns(
        {
            "ann": lambda context: Forfeited("ann", "late") if context.endswith("[7]:") else "hi",
            "bob": lambda context: "[3]",
        }
    )
    players = {SeatName("bob"): Learner("bob"), SeatName("ann"): Learner("ann")}
    episode = await play(auction, players, turns)
    assert [(one.seat, one.forfeits) for one in episode.trajectories] == [("ann", 1), ("bob", 0)]


async def test_a_player_that_cannot_give_its_trajectory_fails_the_episode() -> None:
    turns = ScriptedTurns(dict.fromkeys(("ann", "bob"), lambda context: "[3]"))
    players = {SeatName("ann"): Learner("ann"), SeatName("bob"): Learner("bob", broken=True)}
    episode = await play(auction, players, turns)
    assert (episode.ended, episode.trajectories) == (Ended.FAILED, ())
    assert "no tokens" in episode.recording.reason


async def test_a_turn_that_closes_without_every_seat_fails_the_episode() -> None:
    class Losing:
        async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
            return {}

    episode = await play(auction, writers("ann", "bob"), Losing())  # type: ignore[arg-type]
    assert "turn 0 admitted ann and closed with" in episode.recording.reason
