"""Any game of `envs` can be played at a table."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from scenario_fakes import heard, lines, play, scripted

from envs.conformance import check_game
from envs.game import Game, answered
from scenarios import Forfeit, Scores, Table, games, scenario
from tinker.protocol.values import Ended


@dataclass(frozen=True, slots=True)
class Budgets(Game[int]):
    """Both bid at once, twice, each at most what its own purse allows; the score is the sum of its bids."""

    purse: tuple[int, int]
    bids: tuple[tuple[int, ...], ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("poor", "rich")

    @classmethod
    def start(cls, rng: random.Random) -> Self:
        return cls((rng.randint(1, 3), rng.randint(5, 9)))

    def limit(self, seat: str) -> int:
        return self.purse[self.seats.index(seat)]

    def brief(self, seat: str) -> str:
        return f"You are {seat}."

    def to_act(self) -> tuple[str, ...]:
        return self.seats if len(self.bids) < 2 else ()

    def view(self, seat: str) -> str:
        return f"Bid at most {self.limit(seat)}."

    def answers(self, seat: str) -> tuple[str, ...]:
        return tuple(map(str, range(self.limit(seat) + 1))) if seat in self.to_act() else ()

    def parse(self, seat: str, text: str) -> int:
        if text not in self.answers(seat):
            raise ValueError(f"Bid from 0 to {self.limit(seat)}.")
        return int(text)

    def apply(self, moves: Mapping[str, int]) -> Self:
        answered(self.to_act(), moves)
        return replace(self, bids=(*self.bids, tuple(moves[seat] for seat in self.seats)))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError("not over")
        return {seat: float(sum(bids)) for seat, bids in zip(self.seats, zip(*self.bids, strict=True), strict=True)}


@scenario("poor", "rich", version=1)
async def budgets(table: Table) -> Scores:
    """Two bids each."""
    return (await games.play(table, Budgets((2, 9)))).scores()


@scenario("poor", "rich", version=1, retries=1)
async def patient(table: Table) -> Scores:
    """Two bids each; a bad one may be made again."""
    return (await games.play(table, Budgets((2, 9)))).scores()


@scenario("poor", "rich", version=1)
async def caught(table: Table) -> Scores:
    """Two bids each; whoever forfeits is named by its score."""
    try:
        return (await games.play(table, Budgets((2, 9)))).scores()
    except Forfeit as forfeit:
        return {seat.name: -5.0 if seat.name == forfeit.seat else 5.0 for seat in table}


def test_the_game_of_these_tests_keeps_its_promises() -> None:
    check_game(Budgets, range(20))


async def test_seats_that_act_at_once_may_have_different_legal_answers() -> None:
    episode = await play(budgets, scripted(poor=lines("2", "1"), rich=lines("9", "8")))
    assert episode.ended is Ended.FINISHED
    assert dict(episode.scores) == {"poor": 3.0, "rich": 17.0}


async def test_an_answer_that_only_the_other_seat_may_give_is_a_forfeit() -> None:
    episode = await play(caught, scripted(poor=lines("9"), rich=lines("9")))
    assert dict(episode.scores) == {"poor": -5.0, "rich": 5.0}


async def test_a_forfeit_of_one_of_several_seats_ends_the_game() -> None:
    episode = await play(budgets, scripted(poor=lines("2"), rich=lines("a lot")))
    assert (episode.ended, dict(episode.scores)) == (Ended.FORFEITED, {"rich": -1.0, "poor": 0.0})


async def test_every_seat_hears_its_own_complaint_and_may_try_again() -> None:
    episode = await play(patient, scripted(poor=lines("9", "1"), rich=lines("10", "1")))
    assert episode.ended is Ended.FINISHED
    assert "Bid from 0 to 2." in heard(episode, "poor")
    assert "Bid from 0 to 9." in heard(episode, "rich")


async def test_every_seat_is_briefed_with_its_own_rules_and_sees_its_own_view() -> None:
    episode = await play(budgets, scripted(poor=lines("1"), rich=lines("1")))
    assert heard(episode, "poor").startswith("You are poor.\nBid at most 2.")
    assert "9" not in heard(episode, "poor")
