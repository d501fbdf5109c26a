"""The negotiation: offers in turn, a deal, or nothing."""

from __future__ import annotations

import random

import pytest

from envs import Negotiate
from envs.conformance import check_game
from envs.strategies import fair_negotiator, random_negotiator

START = Negotiate(worth=8, cost=3)


def said(*texts: str, game: Negotiate = START) -> Negotiate:
    for text in texts:
        (seat,) = game.to_act()
        game = game.apply({seat: text})
    return game


def test_the_negotiation_keeps_the_promises_of_a_game() -> None:
    check_game(Negotiate, range(100), longest=4, total=(-1.0, 1.0))
    check_game(Negotiate, range(50), longest=7, total=(-1.0, 1.0), moves=7)


@pytest.mark.parametrize(
    ("texts", "price", "scores"),
    [(("offer 5", "accept"), 5, (3 / 9, 2 / 9)), (("offer 2", "offer 7", "accept"), 7, (1 / 9, 4 / 9)),
     (("offer 2", "walk"), None, (0, 0)), (("walk",), None, (0, 0)), (("offer 1", "offer 9", "offer 2", "walk"), None, (0, 0)),
     (("offer 9", "accept"), 9, (-1 / 9, 6 / 9))],
)  # fmt: skip
def test_a_deal_is_at_the_price_that_was_accepted(
    texts: tuple[str, ...], price: int | None, scores: tuple[float, ...]
) -> None:
    game = said(*texts)
    assert (game.to_act(), game.price) == ((), price)
    assert tuple(game.scores().values()) == pytest.approx(scores)


def test_the_last_word_is_announced_and_can_only_accept_or_walk() -> None:
    game = said("offer 1", "offer 9", "offer 2")
    assert game.view("seller") == "it costs you 3. they offer 2. last word."
    assert game.answers("seller") == ("accept", "walk")
    with pytest.raises(ValueError, match=r"say accept or walk\."):
        game.parse("seller", "offer 5")


def test_nobody_can_accept_before_an_offer() -> None:
    with pytest.raises(ValueError, match="say offer and a number from 1 to 9 or walk"):
        START.parse("buyer", "accept")


def test_a_side_sees_its_own_number_only() -> None:
    assert START.view("buyer") == "it is worth 8 to you. make an offer."
    assert said("offer 5").view("seller") == "it costs you 3. they offer 5."


@pytest.mark.parametrize("strategy", [fair_negotiator, random_negotiator])
def test_scripted_sides_say_nothing_illegal_and_fair_ones_lose_nothing(strategy: object) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        game = Negotiate.start(rng)
        while acting := game.to_act():
            game = game.apply({acting[0]: strategy((), game.view(acting[0]), rng)})  # type: ignore[operator]
        assert strategy is random_negotiator or min(game.scores().values()) >= 0


def test_a_negotiation_needs_an_offer_and_an_answer() -> None:
    with pytest.raises(ValueError, match="needs at least 2"):
        Negotiate.start(random.Random(0), moves=1)
