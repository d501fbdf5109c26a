"""Kuhn poker, and the exact exploitability of strategies in it."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from envs import Dilemma, Kuhn
from envs.conformance import check_game
from envs.exploitability import Seen, exploitability, situations

DEALS = tuple(Kuhn.deals())


def test_kuhn_keeps_the_promises_of_a_zero_sum_game() -> None:
    check_game(Kuhn, range(50), longest=3, total=(0.0, 0.0))


@pytest.mark.parametrize(
    ("said", "won"),
    [(("check", "check"), 1), (("check", "bet", "fold"), -1), (("check", "bet", "call"), 2), (("bet", "fold"), 1),
     (("bet", "call"), 2)],
)  # fmt: skip
def test_the_higher_card_wins_the_pot_unless_it_folds(said: tuple[str, ...], won: float) -> None:
    game = Kuhn(("k", "q"))
    for answer in said:
        (seat,) = game.to_act()
        game = game.apply({seat: game.parse(seat, answer)})
    assert game.scores() == {"alpha": won, "beta": -won}


def test_a_seat_sees_its_own_card_only() -> None:
    assert {Kuhn(("j", card)).view("alpha") for card in "qk"} == {"card j. you open."}
    assert {Kuhn((card, "j"), ("bet",)).view("beta") for card in "qk"} == {"card j. they bet."}


def test_every_deal_is_dealt_equally_often() -> None:
    rng = random.Random(0)
    dealt = [Kuhn.start(rng).cards for _ in range(6_000)]
    assert {deal.cards for deal in DEALS} == set(dealt)
    assert all(900 < dealt.count(deal.cards) < 1_100 for deal in DEALS)


def test_each_seat_has_six_situations() -> None:
    found = situations(DEALS)
    assert {seat: sum(who == seat for who, _ in found) for seat in Kuhn.seats} == {"alpha": 6, "beta": 6}


def aggressive(chances: Mapping[tuple[str, str], float]) -> object:
    """A strategy from the probability of betting or calling, by seat and view."""

    def strategy(seat: str, seen: Seen) -> Mapping[str, float]:
        chance = chances[seat, seen[-1]]
        return {"call": chance, "fold": 1 - chance} if "they bet" in seen[-1] else {"bet": chance, "check": 1 - chance}

    return strategy


def equilibrium(alpha: float) -> dict[tuple[str, str], float]:
    """Kuhn's family of equilibria: alpha bluffs with the jack this often (0 to 1/3), bets the king three times as often."""
    return {
        ("alpha", "card j. you open."): alpha, ("alpha", "card j. they bet."): 0.0,
        ("alpha", "card q. you open."): 0.0, ("alpha", "card q. they bet."): alpha + 1 / 3,
        ("alpha", "card k. you open."): 3 * alpha, ("alpha", "card k. they bet."): 1.0,
        ("beta", "card j. they check."): 1 / 3, ("beta", "card j. they bet."): 0.0,
        ("beta", "card q. they check."): 0.0, ("beta", "card q. they bet."): 1 / 3,
        ("beta", "card k. they check."): 1.0, ("beta", "card k. they bet."): 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("bluffs", [0.0, 0.2, 1 / 3])
def test_nothing_is_to_be_won_from_kuhns_equilibria(bluffs: float) -> None:
    found = exploitability(DEALS, aggressive(equilibrium(bluffs)))  # type: ignore[arg-type]
    assert found.value == pytest.approx(-1 / 18)
    assert found.nash_conv == pytest.approx(0.0, abs=1e-12)


def test_a_bluff_too_many_can_be_exploited() -> None:
    chances = {**equilibrium(0.2), ("alpha", "card j. you open."): 0.5}
    assert exploitability(DEALS, aggressive(chances)).nash_conv > 0.01  # type: ignore[arg-type]


def test_random_play_loses_eleven_twelfths_to_best_responses() -> None:
    """OpenSpiel gives 0.916667 for the NashConv of the uniform strategy."""
    found = exploitability(DEALS, lambda seat, seen: dict.fromkeys(situations(DEALS)[seat, seen], 0.5))
    assert found.nash_conv == pytest.approx(11 / 12)


def test_a_game_with_moves_at_once_is_refused() -> None:
    with pytest.raises(ValueError, match="Dilemma is not a game of two seats who act one after another"):
        exploitability([Dilemma()], lambda seat, seen: {"cooperate": 1.0})
