"""The iterated prisoner's dilemma: a few rounds of cooperating or defecting at the same moment, paid alone or shared."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from envs.game import Game, answered, words

COOPERATE, DEFECT = "cooperate", "defect"
OWN, SHARED = "own", "shared"

PAYOFF = {(COOPERATE, COOPERATE): 3, (COOPERATE, DEFECT): 0, (DEFECT, COOPERATE): 5, (DEFECT, DEFECT): 1}
"""What the first of two moves earns. The most a seat can earn in a whole game is scaled to 1."""


@dataclass(frozen=True, slots=True)
class Dilemma(Game[str]):
    """Mixed motives. With payoff "own" theory says both defect; with "shared" (both get the mean) both cooperate."""

    rounds: int = 4
    payoff: str = OWN
    history: tuple[tuple[str, str], ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    @classmethod
    def start(cls, rng: random.Random, *, rounds: int = 4, payoff: str = OWN) -> Self:
        if payoff not in (OWN, SHARED):
            raise ValueError(f"payoff is {payoff!r}; it must be {OWN!r} or {SHARED!r}")
        return cls(rounds, payoff)

    @property
    def cooperation(self) -> float:
        """The share of all moves so far that cooperated."""
        moves = [move for both in self.history for move in both]
        return moves.count(COOPERATE) / max(1, len(moves))

    def brief(self, seat: str) -> str:
        return f"game dilemma. you are {seat}. there are {self.rounds} rounds. say cooperate or defect."

    def to_act(self) -> tuple[str, ...]:
        return self.seats if len(self.history) < self.rounds else ()

    def view(self, seat: str) -> str:
        if not self.history:
            return "round 1."
        return f"they {self.history[-1][1 - self.seats.index(seat)]}."

    def answers(self, seat: str) -> tuple[str, ...]:
        return (COOPERATE, DEFECT) if seat in self.to_act() else ()

    def parse(self, seat: str, text: str) -> str:
        match words(text):
            case [("cooperate" | "defect") as move]:
                return move
        raise ValueError("not a legal answer. say cooperate or defect.")

    def apply(self, moves: Mapping[str, str]) -> Self:
        answered(self.to_act(), moves)
        alpha, beta = (self.parse(seat, moves[seat]) for seat in self.seats)
        return replace(self, history=(*self.history, (alpha, beta)))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError(f"the game is not over: {len(self.history)} of {self.rounds} rounds are played")
        scale = self.rounds * max(PAYOFF.values())
        own = [
            sum(PAYOFF[alpha, beta] for alpha, beta in self.history) / scale,
            sum(PAYOFF[beta, alpha] for alpha, beta in self.history) / scale,
        ]
        paid = own if self.payoff == OWN else [sum(own) / 2] * 2
        return dict(zip(self.seats, paid, strict=True))
