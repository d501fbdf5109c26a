"""Kuhn poker: three cards, one bet, and the smallest game in which a good player must bluff."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from envs.game import Game, answered, words

CARDS = "jqk"
"""From the lowest to the highest."""
CHECK, BET, FOLD, CALL = "check", "bet", "fold", "call"
OPEN, FACING = (CHECK, BET), (FOLD, CALL)


@dataclass(frozen=True, slots=True)
class Kuhn(Game[str]):
    """Zero-sum, hidden cards. Both put one chip in; a bet is one more. Alpha opens; whoever folds loses one chip."""

    cards: tuple[str, str]
    said: tuple[str, ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    @classmethod
    def start(cls, rng: random.Random) -> Self:
        first, second = rng.sample(CARDS, 2)
        return cls((first, second))

    @classmethod
    def deals(cls) -> Iterator[Self]:
        """Every start; all are equally likely."""
        return (cls((first, second)) for first, second in itertools.permutations(CARDS, 2))

    def brief(self, seat: str) -> str:
        return f"game poker. you are {seat}. cards j q k."

    def to_act(self) -> tuple[str, ...]:
        match self.said:
            case () | ("check", "bet"):
                return ("alpha",)
            case (_,):
                return ("beta",)
        return ()

    def view(self, seat: str) -> str:
        card = self.cards[self.seats.index(seat)]
        heard = f"they {self.said[-1]}." if self.said else "you open."
        return f"card {card}. {heard}"

    def answers(self, seat: str) -> tuple[str, ...]:
        if seat not in self.to_act():
            return ()
        return FACING if self.said[-1:] == (BET,) else OPEN

    def parse(self, seat: str, text: str) -> str:
        legal = self.answers(seat)
        match words(text):
            case [move] if move in legal:
                return move
        raise ValueError(f"not a legal answer. say {' or '.join(legal)}.")

    def apply(self, moves: Mapping[str, str]) -> Self:
        answered(self.to_act(), moves)
        ((seat, move),) = moves.items()
        return replace(self, said=(*self.said, self.parse(seat, move)))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError(f"the game is not over: {self.to_act()[0]} must answer")
        better = 1.0 if CARDS.index(self.cards[0]) > CARDS.index(self.cards[1]) else -1.0
        match self.said:
            case (*_, "call"):
                won = 2 * better
            case ("bet", "fold"):
                won = 1.0
            case (*_, "fold"):
                won = -1.0
            case _:
                won = better
        return dict(zip(self.seats, (won, -won), strict=True))
