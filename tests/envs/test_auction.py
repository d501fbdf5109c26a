"""The auction: words, sealed bids, second price."""

from __future__ import annotations

import random

import pytest

from envs import Auction
from envs.conformance import check_game
from envs.strategies import random_bidder, truthful_bidder

START = Auction((3, 9, 5), ties=("cat", "bob", "ann"))


def bid(game: Auction, *bids: int) -> Auction:
    while len(game.said) < 3:
        (seat,) = game.to_act()
        game = game.apply({seat: "high"})
    return game.apply({seat: f"bid {each}" for seat, each in zip(game.seats, bids, strict=True)})


def test_the_auction_keeps_the_promises_of_a_game() -> None:
    check_game(Auction, range(50), longest=4, total=(-1.0, 1.0))


@pytest.mark.parametrize(
    ("bids", "winner", "scores"),
    [((3, 9, 5), "bob", (0, 4 / 9, 0)), ((9, 8, 0), "ann", (-5 / 9, 0, 0)), ((4, 4, 4), "cat", (0, 0, 1 / 9)),
     ((0, 4, 4), "cat", (0, 0, 1 / 9)), ((0, 0, 0), "cat", (0, 0, 5 / 9))],
)  # fmt: skip
def test_the_highest_bid_wins_and_pays_the_second(
    bids: tuple[int, ...], winner: str, scores: tuple[float, ...]
) -> None:
    game = bid(START, *bids)
    assert game.winner == winner
    assert tuple(game.scores().values()) == pytest.approx(scores)


def test_a_bidder_sees_its_own_value_and_every_word_but_no_bid() -> None:
    game = START.apply({"ann": "low"}).apply({"bob": "high"}).apply({"cat": "low"})
    assert game.view("bob") == "ann low. bob high. cat low. it is worth 9 to you. bid."
    assert START.view("bob") == "it is worth 9 to you. say low or high."


def test_no_bid_is_better_than_the_true_value_whatever_the_others_bid() -> None:
    """Vickrey's theorem, by trying everything."""
    for others in [(first, second) for first in range(10) for second in range(10)]:
        for value in range(1, 10):
            own = Auction((value, 1, 1), ties=("bob", "ann", "cat"))
            profits = [bid(own, mine, *others).scores()["ann"] for mine in range(10)]
            assert profits[value] == max(profits)


def test_truthful_bidders_are_efficient_and_random_ones_are_not() -> None:
    def played(rng: random.Random, strategy: object) -> Auction:
        game = Auction.start(rng)
        while acting := game.to_act():
            game = game.apply({seat: strategy((), game.view(seat), rng) for seat in acting})  # type: ignore[operator]
        return game

    true, any = (
        [played(random.Random(seed), each) for seed in range(300)] for each in (truthful_bidder, random_bidder)
    )
    assert {game.efficiency for game in true} == {1.0}
    assert {game.honesty for game in true} == {1.0}
    assert 0.6 < sum(game.efficiency for game in any) / 300 < 0.8


@pytest.mark.parametrize("text", ["bid 10", "bid -1", "bid", "high bid", "bid 3 4"])
def test_an_answer_that_is_no_bid_is_refused(text: str) -> None:
    game = START.apply({"ann": "low"}).apply({"bob": "high"}).apply({"cat": "low"})
    with pytest.raises(ValueError, match="say bid and a number from 0 to 9"):
        game.parse("ann", text)
    with pytest.raises(ValueError, match="say low or high"):
        START.parse("ann", "bid 3")
