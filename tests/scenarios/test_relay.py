"""The relay: who may leave, who comes late, and what passing on costs."""

from __future__ import annotations

import pytest
from scenario_fakes import lines

from scenarios import load_scenario, play_scripted
from scenarios.library.relay import faithful
from tinker.protocol.values import Ended

RELAY = load_scenario("relay")
FAITHFUL = dict.fromkeys(RELAY.seats, faithful)


async def test_faithful_seats_hand_the_word_on() -> None:
    for seed in range(20):
        episode = await play_scripted(RELAY, seed=seed, scripts=FAITHFUL)
        assert dict(episode.measures) == {"arrived": 1.0, "left": 0.0}
        assert dict(episode.scores) == {"north": 1.0, "east": 0.8, "south": 1.0, "west": 1.0}


async def test_a_seat_that_leaves_pays_nothing_and_the_third_hears_the_first() -> None:
    episode = await play_scripted(RELAY, scripts={**FAITHFUL, "east": lines("leave")})
    assert dict(episode.scores) == dict.fromkeys(RELAY.seats, 1.0)
    assert dict(episode.measures) == {"arrived": 1.0, "left": 1.0}


async def test_the_last_seat_is_told_nothing_before_its_turn() -> None:
    episode = await play_scripted(RELAY, scripts=FAITHFUL)
    west = next(index for index, line in enumerate(episode.recording.lines) if line.seat == "west")
    assert [line.kind for line in episode.recording.lines[west:]] == ["brief", "ask", "reply"]


@pytest.mark.parametrize(("seat", "text"), [("north", "leave"), ("east", "say 8"), ("south", "say"), ("west", "7")])
async def test_an_illegal_answer_ends_it(seat: str, text: str) -> None:
    episode = await play_scripted(RELAY, scripts={**FAITHFUL, seat: lines(text)})
    assert episode.ended is Ended.FORFEITED
    assert dict(episode.scores) == {each: -0.5 if each == seat else 0.0 for each in RELAY.seats}


async def test_only_the_second_seat_may_leave() -> None:
    episode = await play_scripted(RELAY, scripts={**FAITHFUL, "south": lines("leave")})
    assert "say say and a number from 1 to 7" in episode.recording.reason
