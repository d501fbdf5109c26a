"""The rules of the guessing game."""

import random

import pytest

from envs import Guess
from envs.strategies import binary_search, honest_hinter


def play(game: Guess) -> Guess:
    rng = random.Random(0)
    sensible = {"hinter": honest_hinter, "guesser": binary_search}
    while game.to_act():
        (seat,) = game.to_act()
        game = game.apply({seat: game.parse(seat, sensible[seat]((), game.view(seat), rng))})
    return game


@pytest.mark.parametrize("secret", range(1, 8))
def test_binary_search_with_true_hints_finds_every_secret(secret: int) -> None:
    assert play(Guess(secret)).scores() == {"hinter": 1.0, "guesser": 1.0}


def test_the_game_is_over_and_worth_nothing_after_three_wrong_guesses() -> None:
    game = Guess(secret=7, guesses=(1, 2), hints=("higher", "higher")).apply({"guesser": 3})
    assert game.to_act() == ()
    assert game.scores() == {"hinter": 0.0, "guesser": 0.0}


def test_the_hinter_answers_every_wrong_guess_but_the_last() -> None:
    game = Guess(secret=7)
    assert game.to_act() == ("guesser",)
    game = game.apply({"guesser": 1})
    assert game.to_act() == ("hinter",)
    assert game.apply({"hinter": "lower"}).to_act() == ("guesser",)


def test_the_guesser_sees_hints_and_never_the_secret() -> None:
    game = Guess(secret=5, guesses=(4, 6), hints=("higher", "lower"))
    assert game.view("guesser") == "higher than 4. lower than 6."
    assert Guess(secret=5).view("guesser") == Guess(secret=2).view("guesser") == "first guess."


def test_the_hinter_sees_the_secret_and_the_last_guess() -> None:
    assert Guess(secret=5, guesses=(4, 6), hints=("higher",)).view("hinter") == "secret 5. guess 6."


@pytest.mark.parametrize("text", ["guess 0", "guess 8", "guess", "4", "guess four", "guess 4 5", "guess -1", "guess ²"])
def test_what_is_no_guess_is_refused_with_the_legal_ones(text: str) -> None:
    with pytest.raises(ValueError, match="guess and a number from 1 to 7"):
        Guess(secret=5).parse("guesser", text)


def test_case_space_and_a_full_stop_do_not_matter() -> None:
    assert Guess(secret=5).parse("guesser", " Guess 4.\n") == 4
    assert Guess(secret=5).parse("hinter", "HIGHER") == "higher"


def test_more_numbers_make_a_larger_game() -> None:
    game = Guess.start(random.Random(0), secret_max=1000)
    assert game.parse("guesser", "guess 1000") == 1000
    assert "from 1 to 1000" in game.brief("guesser")
