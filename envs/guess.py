"""Guess a number: the hinter knows the secret, the guesser has three guesses, and both win if it is found."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from envs.game import Game, answered, words

HINTS = ("higher", "lower")


@dataclass(frozen=True, slots=True)
class Guess(Game[int | str]):
    """Purely cooperative; hints are claims, nothing forces them to be true. Binary search with true hints always wins."""

    secret: int
    secret_max: int = 7
    tries: int = 3
    guesses: tuple[int, ...] = ()
    hints: tuple[str, ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("hinter", "guesser")

    @classmethod
    def start(cls, rng: random.Random, *, secret_max: int = 7, tries: int = 3) -> Self:
        return cls(rng.randint(1, secret_max), secret_max, tries)

    @property
    def found(self) -> bool:
        return self.guesses[-1:] == (self.secret,)

    def brief(self, seat: str) -> str:
        if seat == "hinter":
            return "game guess. you are the hinter. say higher or lower."
        return f"game guess. you are the guesser. the secret is from 1 to {self.secret_max}. say guess and a number."

    def to_act(self) -> tuple[str, ...]:
        if self.found or len(self.guesses) == self.tries:
            return ()
        return ("hinter",) if len(self.hints) < len(self.guesses) else ("guesser",)

    def view(self, seat: str) -> str:
        if seat == "hinter":
            return f"secret {self.secret}. guess {self.guesses[-1]}." if self.guesses else f"secret {self.secret}."
        known = zip(self.hints, self.guesses, strict=False)
        return " ".join(f"{hint} than {guess}." for hint, guess in known) or "first guess."

    def answers(self, seat: str) -> tuple[str, ...]:
        if seat not in self.to_act():
            return ()
        return HINTS if seat == "hinter" else tuple(f"guess {number}" for number in range(1, self.secret_max + 1))

    def parse(self, seat: str, text: str) -> int | str:
        match seat, words(text):
            case "hinter", [("higher" | "lower") as hint]:
                return hint
            case "guesser", ["guess", number] if number.isdecimal() and 1 <= int(number) <= self.secret_max:
                return int(number)
        wanted = "higher or lower" if seat == "hinter" else f"guess and a number from 1 to {self.secret_max}"
        raise ValueError(f"not a legal answer. say {wanted}.")

    def apply(self, moves: Mapping[str, int | str]) -> Self:
        answered(self.to_act(), moves)
        ((seat, move),) = moves.items()
        if seat == "hinter":
            return replace(self, hints=(*self.hints, str(self.parse(seat, str(move)))))
        return replace(self, guesses=(*self.guesses, int(self.parse(seat, f"guess {move}"))))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError(f"the game is not over: {self.to_act()[0]} must act")
        return dict.fromkeys(self.seats, 1.0 if self.found else 0.0)
