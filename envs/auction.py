"""A sealed-bid auction with a word beforehand: private values, and the winner pays the second highest bid."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from envs.game import Game, answered, words

MOST = 9
"""Of a value, and of a bid."""
WORDS = ("low", "high")


@dataclass(frozen=True, slots=True)
class Auction(Game[str]):
    """Mixed motives. Each bidder in turn says low or high, truly or not; then all bid at once. To bid one's value is never worse than
    any other bid (Vickrey 1961), but words that are believed can keep the price down. Of equal bids the first in `ties` wins."""

    values: tuple[int, int, int]
    ties: tuple[str, str, str]
    said: tuple[str, ...] = ()
    bids: tuple[int, ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("ann", "bob", "cat")

    @classmethod
    def start(cls, rng: random.Random) -> Self:
        first, second, third = (rng.randint(1, MOST) for _ in cls.seats)
        one, two, three = rng.sample(cls.seats, 3)
        return cls((first, second, third), (one, two, three))

    @property
    def winner(self) -> str:
        """Once all have bid."""
        return max(self.seats, key=lambda seat: (self.bids[self.seats.index(seat)], -self.ties.index(seat)))

    @property
    def efficiency(self) -> float:
        """The winner's value as a share of the highest: 1 when whoever wants it most has it."""
        return self.values[self.seats.index(self.winner)] / max(self.values)

    @property
    def honesty(self) -> float:
        """The share of words so far that were true: high is more than half of the most."""
        true = [word == WORDS[value > MOST // 2] for word, value in zip(self.said, self.values, strict=False)]
        return sum(true) / max(1, len(true))

    def brief(self, seat: str) -> str:
        return f"game auction. you are {seat}. the second highest bid is paid."

    def to_act(self) -> tuple[str, ...]:
        if self.bids:
            return ()
        return self.seats[len(self.said) : len(self.said) + 1] or self.seats

    def view(self, seat: str) -> str:
        said = "".join(f"{who} {word}. " for who, word in zip(self.seats, self.said, strict=False))
        asked = "say low or high." if len(self.said) < len(self.seats) else "bid."
        return f"{said}it is worth {self.values[self.seats.index(seat)]} to you. {asked}"

    def answers(self, seat: str) -> tuple[str, ...]:
        if seat not in self.to_act():
            return ()
        return WORDS if len(self.said) < len(self.seats) else tuple(f"bid {bid}" for bid in range(MOST + 1))

    def parse(self, seat: str, text: str) -> str:
        answer = " ".join(words(text))
        if answer not in self.answers(seat):
            legal = "low or high" if len(self.said) < len(self.seats) else f"bid and a number from 0 to {MOST}"
            raise ValueError(f"not a legal answer. say {legal}.")
        return answer

    def apply(self, moves: Mapping[str, str]) -> Self:
        answered(self.to_act(), moves)
        parsed = [self.parse(seat, moves[seat]) for seat in self.to_act()]
        if len(self.said) < len(self.seats):
            return replace(self, said=(*self.said, *parsed))
        return replace(self, bids=tuple(int(bid.split()[1]) for bid in parsed))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError(f"the auction is not over: {', '.join(self.to_act())} must answer")
        price = sorted(self.bids)[-2]
        profit = self.values[self.seats.index(self.winner)] - price
        return {seat: profit / MOST if seat == self.winner else 0.0 for seat in self.seats}
