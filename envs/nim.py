"""Nim with one pile: two players take one to three sticks in turn, and whoever takes the last stick wins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from envs.game import Game, answered, words

MOST = 3
LOST = MOST + 1
"""Whoever must move on a multiple of this loses against a perfect player."""


@dataclass(frozen=True, slots=True)
class Nim(Game[int]):
    """Zero-sum. Whoever is to move on a pile that is no multiple of four wins by leaving a multiple of four."""

    pile: int
    mover: str
    taken: tuple[int, ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    @classmethod
    def start(
        cls, rng: random.Random, *, pile_min: int = 4, pile_max: int = 9, first: str = "", winnable: bool = False
    ) -> Self:
        """`first` moves first (empty: either); `winnable`: only piles that whoever moves first can win."""
        if first and first not in cls.seats:
            raise ValueError(f"first is {first!r}; the seats are {', '.join(cls.seats)}")
        piles = [pile for pile in range(pile_min, pile_max + 1) if pile % LOST or not winnable]
        if not piles or pile_min < 1:
            raise ValueError(
                f"no pile from {pile_min} to {pile_max} will do: start with at least one stick, in a range that has one"
            )
        return cls(rng.choice(piles), first or rng.choice(cls.seats))

    @property
    def other(self) -> str:
        """The seat that is not to move; it took the last stick if the pile is empty."""
        return self.seats[1 - self.seats.index(self.mover)]

    def optimal_moves(self) -> tuple[int, int]:
        """Of the moves so far that could leave a multiple of four: how many did, and how many there were."""
        pile, good, possible = self.pile + sum(self.taken), 0, 0
        for count in self.taken:
            possible += pile % LOST != 0
            good += count == pile % LOST
            pile -= count
        return good, possible

    def brief(self, seat: str) -> str:
        return f"game nim. you are {seat}. take 1 to 3. the last stick wins. say take and a number."

    def to_act(self) -> tuple[str, ...]:
        return (self.mover,) if self.pile else ()

    def view(self, seat: str) -> str:
        return f"pile {self.pile}."

    def answers(self, seat: str) -> tuple[str, ...]:
        if seat not in self.to_act():
            return ()
        return tuple(f"take {count}" for count in range(1, min(MOST, self.pile) + 1))

    def parse(self, seat: str, text: str) -> int:
        most = min(MOST, self.pile)
        match words(text):
            case ["take", count] if count.isdecimal() and 1 <= int(count) <= most:
                return int(count)
        raise ValueError(f"not a legal answer. say take and a number from 1 to {most}.")

    def apply(self, moves: Mapping[str, int]) -> Self:
        answered(self.to_act(), moves)
        count = self.parse(self.mover, f"take {moves[self.mover]}")
        return replace(self, pile=self.pile - count, mover=self.other, taken=(*self.taken, count))

    def scores(self) -> Mapping[str, float]:
        if self.pile:
            raise ValueError(f"the game is not over: {self.mover} must take from a pile of {self.pile}")
        return {seat: 1.0 if seat == self.other else -1.0 for seat in self.seats}
