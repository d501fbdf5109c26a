"""What a scenario can do at its table: talk, ask, retry, forfeit; and what it may not do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from scenario_fakes import (
    ScriptedTurns,
    auction,
    bracketed,
    heard,
    lines,
    play,
    scripted,
    writers,
)

from scenarios import Forfeit, Forfeited, Scenario, Scores, Table, cuts, scenario
from tinker.protocol.values import Ended, Finish, SeatName

EVEN = {"ann": 0.0, "bob": 0.0, "cleo": 0.0}


def three(function: Callable[..., Awaitable[Scores]], retries: int = 0) -> Scenario:
    """A throw-away scenario of three seats."""
    function.__doc__ = "A test."
    return scenario("ann", "bob", "cleo", version=1, retries=retries, name="three")(function)


async def test_the_auction_plays_to_its_scores() -> None:
    episode = await play(auction, scripted(ann=lines("hi", "[40]"), bob=lines("ho", "[30]")), seed=3)
    worth = int(heard(episode, "ann").split("worth ")[1].split()[0])
    assert episode.ended is Ended.FINISHED
    assert dict(episode.scores) == {"ann": worth - 30, "bob": 0.0}
    assert dict(episode.measures) == {"bids": 2.0}


async def test_all_needs_of_a_turn_go_out_together_in_seat_order() -> None:
    async def ask(table: Table) -> Scores:
        await table.act_all({"cleo": "c?", "ann": "a?"}, str)
        await table["bob"].act("b?", str)
        return EVEN

    turns = ScriptedTurns(dict.fromkeys(("ann", "bob", "cleo"), lambda context: "yes"))
    episode = await play(three(ask), writers("cleo", "bob", "ann"), turns)
    assert turns.opened == [(0, ("ann", "cleo")), (1, ("bob",))]
    assert episode.ended is Ended.FINISHED


async def test_a_seat_tries_again_with_the_parsers_message_in_a_sub_turn_of_its_own() -> None:
    players = writers("ann", "bob")
    scripts = {
        "ann": lambda context: "hi" if context.endswith("bidder.") else "[8]",
        "bob": lambda context: "[9]" if context.endswith("like [7].") else "nine",
    }
    turns = ScriptedTurns(scripts)
    episode = await play(auction, players, turns)
    assert turns.opened == [(0, ("ann",)), (1, ("bob",)), (2, ("ann", "bob")), (3, ("bob",))]
    assert players[SeatName("bob")].prompts[-1].endswith("Write your bid as a number in brackets, like [7].")
    assert players[SeatName("bob")].verdicts == [True, False, True]
    assert dict(episode.measures) == {"bids": 2.0}


async def test_one_forfeiting_seat_of_act_all_is_a_value_beside_the_others() -> None:
    episode = await play(auction, scripted(ann=lines("hi", "eight"), bob=lines("ho", "[9]")))
    assert episode.ended is Ended.FINISHED
    assert dict(episode.measures) == {"bids": 1.0}
    forfeits = [line for line in episode.recording.lines if line.kind == "forfeit"]
    assert [line.seat for line in forfeits] == ["ann"]
    assert forfeits[0].text.endswith("(after 2 tries)")


async def test_results_of_act_all_are_in_seat_order() -> None:
    results: list[Any] = []

    async def ask(table: Table) -> Scores:
        results.extend((await table.act_all({"cleo": "?", "bob": "?", "ann": "?"}, bracketed)).items())
        return EVEN

    await play(three(ask), scripted(ann=lines("[1]"), bob=lines("two"), cleo=lines("[3]")))
    assert [seat for seat, _ in results] == ["ann", "bob", "cleo"]
    assert isinstance(results[1][1], Forfeited)
    assert not results[1][1]


async def test_every_seat_of_act_all_may_have_a_parser_of_its_own() -> None:
    results: list[dict[str, Any]] = []

    async def ask(table: Table) -> Scores:
        results.append(await table.act_all({"bob": "?", "ann": "?"}, {"ann": bracketed, "bob": len}))
        return EVEN

    await play(three(ask), scripted(ann=lines("[7]"), bob=lines("[7]"), cleo=lines("")))
    assert results == [{"ann": 7, "bob": 3}]


async def test_players_of_every_kind_are_judged_and_returned_in_seat_order() -> None:
    results: list[tuple[str, Any]] = []

    async def ask(table: Table) -> Scores:
        results.extend((await table.act_all("?", bracketed)).items())
        return EVEN

    tries = ["one", "[1]"]
    turns = ScriptedTurns({"ann": lambda context: tries.pop(0), "cleo": lambda context: "[3]"})
    episode = await play(three(ask, retries=1), writers("ann", "cleo") | scripted(bob=lines("[2]")), turns)
    assert results == [("ann", 1), ("bob", 2), ("cleo", 3)]
    replies = [line.seat for line in episode.recording.lines if line.kind in ("reply", "complaint")]
    assert replies == ["ann", "bob", "cleo", "ann"]


async def test_an_uncaught_forfeit_ends_the_episode_with_the_declared_scores() -> None:
    async def ask(table: Table) -> Scores:
        await table["bob"].act("?", bracketed)
        return EVEN

    episode = await play(three(ask, retries=2), scripted(ann=lines(""), bob=lines("hello"), cleo=lines("")))
    assert episode.ended is Ended.FORFEITED
    assert dict(episode.scores) == {"ann": 0.0, "bob": -1.0, "cleo": 0.0}
    assert [line.kind for line in episode.recording.lines] == ["ask", "complaint"] * 3 + ["forfeit"]
    assert "(after 3 tries)" in episode.recording.reason


async def test_a_seat_whose_turn_passed_its_deadline_forfeits_without_another_try() -> None:
    async def ask(table: Table) -> Scores:
        try:
            await table["bob"].act("?", str)
        except Forfeit as forfeit:
            return {**EVEN, forfeit.seat: -3.0}
        return EVEN

    turns = ScriptedTurns({"bob": lambda context: Forfeited("bob", "passed its deadline")})
    episode = await play(three(ask, retries=2), writers("ann", "bob", "cleo"), turns)
    assert dict(episode.scores)["bob"] == -3.0
    assert [(line.kind, line.text) for line in episode.recording.lines] == [
        ("ask", "?"),
        ("forfeit", "passed its deadline"),
    ]


@pytest.mark.parametrize(
    ("made", "requests", "reason"),
    [
        ([Finish.LENGTH, Finish.LENGTH], 2, "truncated (length)"),
        ([Finish.CONTEXT], 1, "truncated (context)"),
        ([Finish.LENGTH, Finish.CONTEXT], 2, "truncated (context)"),
        ([Finish.LENGTH, "whole"], 2, ""),
        (["whole"], 1, ""),
    ],
)
async def test_a_cut_reply_is_never_parsed_and_its_limit_is_counted(
    made: list[str | Finish], requests: int, reason: str
) -> None:
    parsed: list[str] = []

    async def ask(table: Table) -> Scores:
        await table["ann"].act("?", lambda text: parsed.append(text))
        return EVEN

    left = list(made)
    turns = ScriptedTurns({"ann": lambda context: left.pop(0)})
    players = writers("ann", "bob", "cleo")
    episode = await play(three(ask, retries=1), players, turns)
    assert parsed == [text for text in made if text == "whole"]
    assert len(turns.opened) == requests
    assert cuts(episode.recording) == {
        limit.value: made.count(limit) for limit in (Finish.LENGTH, Finish.CONTEXT) if limit in made
    }
    assert players[SeatName("ann")].verdicts == [not isinstance(one, Finish) for one in made]
    assert (reason in episode.recording.reason) if reason else episode.ended is Ended.FINISHED


@pytest.mark.parametrize(("text", "named"), [("\ud800", "no valid Unicode"), ("x" * 200_001, "200001 characters")])
async def test_a_reply_that_no_seat_could_hear_is_the_players_fault(text: str, named: str) -> None:
    async def repeat(table: Table) -> Scores:
        table.say("ann", await table["ann"].act("?", str))
        return EVEN

    episode = await play(three(repeat), scripted(ann=lines(text), bob=lines(""), cleo=lines("")))
    assert episode.ended is Ended.FORFEITED
    assert named in episode.recording.reason


async def test_what_a_seat_hears_reaches_no_other_prompt_or_line() -> None:
    async def whisper(table: Table) -> Scores:
        table["bob"].hear("K-7731")
        table.say("ann", "open word")
        for _ in range(2):
            await table.act_all("?", str)
        return EVEN

    players = writers("ann", "bob", "cleo")
    turns = ScriptedTurns(dict.fromkeys(("ann", "bob", "cleo"), lambda context: "ok"))
    episode = await play(three(whisper), players, turns)
    prompts = {seat: "\n".join(player.prompts) for seat, player in players.items()}
    assert "K-7731" in prompts[SeatName("bob")]
    assert "open word" in prompts[SeatName("bob")]
    assert "open word" in prompts[SeatName("cleo")]
    assert "open word" not in prompts[SeatName("ann")]
    for seat in ("ann", "cleo"):
        assert "K-7731" not in prompts[SeatName(seat)]
        assert "K-7731" not in heard(episode, seat)


async def test_seats_that_leave_early_are_not_asked_again() -> None:
    async def leaving(table: Table) -> Scores:
        for cycle in range(4):
            for seat in table:
                if cycle < {"ann": 1, "bob": 2, "cleo": 4}[seat.name]:
                    await seat.act("?", str)
        return EVEN

    episode = await play(three(leaving), scripted(ann=bidder0, bob=bidder0, cleo=bidder0))
    asked = [line.seat for line in episode.recording.lines if line.kind == "ask"]
    assert asked == ["ann", "bob", "cleo", "bob", "cleo", "cleo", "cleo"]


def bidder0(heard: object, prompt: str, rng: object) -> str:
    return "[0]"


async def _late(table: Table) -> None:
    table["ann"].hear("x")
    table["ann"].brief("y")


async def _twice(table: Table) -> None:
    table["ann"].brief("x")
    table["ann"].brief("y")


async def _number(table: Table) -> None:
    await table["ann"].act(7, str)  # type: ignore[arg-type]


async def _endless(table: Table) -> None:
    await table["ann"].act("x" * 200_001, str)


async def _surrogate(table: Table) -> None:
    table["ann"].hear("\ud800")


async def _stranger(table: Table) -> None:
    await table.act_all({"anne": "?"}, str)


async def _same(table: Table) -> None:
    await table.act_all("?", str, seats=["ann", "ann"])


async def _uneven(table: Table) -> None:
    await table.act_all({"ann": "?"}, str, seats=["ann", "bob"])


async def _unparsed(table: Table) -> None:
    await table.act_all("?", {"ann": str, "bob": str})


async def _nothing(table: Table) -> None:
    table.measure("success", None)  # type: ignore[arg-type]


async def _nan(table: Table) -> None:
    table.measure("success", float("nan"))


async def _async_parser(table: Table) -> None:
    async def parse(text: str) -> str:
        return text

    await table["ann"].act("?", parse)


async def _crashing_parser(table: Table) -> None:
    await table["ann"].act("?", {"yes": 1}.__getitem__)


async def _asks_itself(table: Table) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(table["ann"].act, "?", str)
        group.start_soon(table["ann"].act, "?", str)


async def _asks_two_at_a_time(table: Table) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(table["ann"].act, "?", str)
        group.start_soon(table["bob"].act, "?", str)


async def _whispers_in_a_turn(table: Table) -> None:
    await table["ann"].act("?", table["bob"].hear)


MISUSES = [
    (_late, "'ann' is briefed after other things"),
    (_twice, "'ann' is briefed after other things"),
    (_number, "prompt for seat 'ann' is 7 (int); expected a string"),
    (_endless, "has 200001 characters"),
    (_surrogate, "no valid Unicode"),
    (_stranger, "no seat 'anne' at this table (did you mean 'ann'?)"),
    (_same, "names a seat twice"),
    (_uneven, "give each seat one prompt"),
    (_unparsed, "give each seat one parser"),
    (_nothing, "measure 'success' is None"),
    (_nan, "measure 'success' is nan"),
    (_async_parser, "parser of seat 'ann' is an `async def`"),
    (_crashing_parser, "parser of seat 'ann' raised KeyError"),
    (_asks_itself, "act while the turn of ann is open"),
    (_asks_two_at_a_time, "act while the turn of ann is open"),
    (_whispers_in_a_turn, "hear while the turn of ann is open"),
]


@pytest.mark.parametrize(("misuse", "named"), MISUSES)
async def test_misuse_of_the_table_fails_the_episode_and_says_what_to_do(
    misuse: Callable[[Table], Awaitable[None]], named: str
) -> None:
    async def misusing(table: Table) -> Scores:
        await misuse(table)
        return EVEN

    episode = await play(three(misusing), scripted(ann=bidder0, bob=bidder0, cleo=bidder0))
    assert episode.ended is Ended.FAILED
    assert named in episode.recording.reason
    assert "ScenarioError" in episode.recording.reason


@pytest.mark.parametrize(("misuse", "named"), MISUSES)
async def test_a_scenario_cannot_hide_its_misuse_by_catching_it(
    misuse: Callable[[Table], Awaitable[None]], named: str
) -> None:
    async def hiding(table: Table) -> Scores:
        try:
            await misuse(table)
        except Exception:
            return EVEN
        return EVEN

    episode = await play(three(hiding), scripted(ann=bidder0, bob=bidder0, cleo=bidder0))
    assert (episode.ended, episode.scores) == (Ended.FAILED, ())
    assert named in episode.recording.reason


async def test_acting_at_a_table_whose_episode_has_ended_is_refused() -> None:
    kept: list[Table] = []

    async def leaking(table: Table) -> Scores:
        kept.append(table)
        return EVEN

    await play(three(leaking), scripted(ann=bidder0, bob=bidder0, cleo=bidder0))
    with pytest.raises(Exception, match="episode has ended"):
        await kept[0]["ann"].act("?", str)
