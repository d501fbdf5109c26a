"""The rules of nim."""

import random

import pytest

from envs import Nim
from envs.strategies import Strategy, perfect_nim, random_nim


def play(game: Nim, players: dict[str, Strategy], rng: random.Random) -> dict[str, float]:
    while game.to_act():
        (seat,) = game.to_act()
        game = game.apply({seat: game.parse(seat, players[seat]((), game.view(seat), rng))})
    return dict(game.scores())


@pytest.mark.parametrize("pile", [5, 6, 7, 9])
def test_the_perfect_player_wins_every_won_pile(pile: int) -> None:
    rng = random.Random(pile)
    for _ in range(20):
        assert play(Nim(pile, "beta"), {"alpha": random_nim, "beta": perfect_nim}, rng) == {"alpha": -1.0, "beta": 1.0}


@pytest.mark.parametrize("pile", [4, 8])
def test_the_perfect_player_wins_against_whoever_starts_on_a_multiple_of_four(pile: int) -> None:
    rng = random.Random(pile)
    for _ in range(20):
        assert play(Nim(pile, "beta"), {"alpha": perfect_nim, "beta": random_nim}, rng)["alpha"] == 1.0


def test_whoever_takes_the_last_stick_wins() -> None:
    assert Nim(2, "alpha").apply({"alpha": 2}).scores() == {"alpha": 1.0, "beta": -1.0}


def test_players_take_turns() -> None:
    assert Nim(5, "alpha").apply({"alpha": 1}).to_act() == ("beta",)


@pytest.mark.parametrize("text", ["take 3", "take 0", "take", "2", "take 2 2", "take -1"])
def test_what_cannot_be_taken_from_two_sticks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a number from 1 to 2"):
        Nim(2, "alpha").parse("alpha", text)


def test_a_move_that_was_never_parsed_is_refused_too() -> None:
    with pytest.raises(ValueError, match="from 1 to 2"):
        Nim(2, "alpha").apply({"alpha": 3})


def test_starts_cover_the_piles_and_both_movers() -> None:
    rng = random.Random(0)
    starts = {(game.pile, game.mover) for game in (Nim.start(rng) for _ in range(300))}
    assert starts == {(pile, mover) for pile in range(4, 10) for mover in Nim.seats}
