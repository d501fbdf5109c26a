"""The rules of the iterated prisoner's dilemma."""

import random

import pytest

from envs import Dilemma


def after(*moves: tuple[str, str], payoff: str = "own") -> Dilemma:
    game = Dilemma(rounds=len(moves), payoff=payoff)
    for alpha, beta in moves:
        game = game.apply({"alpha": alpha, "beta": beta})
    return game


C, D = "cooperate", "defect"


@pytest.mark.parametrize(
    ("moves", "own"),
    [
        ([(C, C)] * 4, (0.6, 0.6)),
        ([(D, D)] * 4, (0.2, 0.2)),
        ([(D, C)] * 4, (1.0, 0.0)),
        ([(C, C), (D, C), (D, D), (C, D)], (0.45, 0.45)),
    ],
)
def test_own_payoffs_are_the_classic_ones_scaled_to_one(moves: list[tuple[str, str]], own: tuple[float, float]) -> None:
    assert after(*moves).scores() == pytest.approx(dict(zip(("alpha", "beta"), own, strict=True)))


def test_shared_payoffs_are_the_mean_of_both() -> None:
    assert after(*[(D, C)] * 4, payoff="shared").scores() == {"alpha": 0.5, "beta": 0.5}


def test_both_seats_act_at_once_in_every_round() -> None:
    assert Dilemma().to_act() == ("alpha", "beta")
    assert after((C, D)).to_act() == ()


def test_each_seat_is_told_what_the_other_did() -> None:
    game = after((C, D))
    assert (game.view("alpha"), game.view("beta")) == ("they defect.", "they cooperate.")


def test_the_payoff_is_not_told_so_that_only_the_scores_differ() -> None:
    own, shared = Dilemma(payoff="own"), Dilemma(payoff="shared")
    assert (own.brief("alpha"), own.view("alpha")) == (shared.brief("alpha"), shared.view("alpha"))


def test_cooperation_is_the_share_of_cooperating_moves() -> None:
    assert after((C, C), (C, D)).cooperation == 0.75


def test_an_unknown_payoff_is_refused() -> None:
    with pytest.raises(ValueError, match="'own' or 'shared'"):
        Dilemma.start(random.Random(0), payoff="mine")
