"""A negotiation over one price: private worth and cost, offers in turn, and either side may accept or walk away."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from envs.game import Game, answered, words

MOST = 9
"""Of a worth, a cost and a price."""
ACCEPT, WALK = "accept", "walk"


@dataclass(frozen=True, slots=True)
class Negotiate(Game[str]):
    """Mixed motives. The buyer makes the first offer. Whoever walks away, or has no move left, leaves both with nothing."""

    worth: int
    cost: int
    moves: int = 4
    said: tuple[str, ...] = ()

    seats: ClassVar[tuple[str, ...]] = ("buyer", "seller")

    @classmethod
    def start(cls, rng: random.Random, *, moves: int = 4) -> Self:
        if moves < 2:
            raise ValueError(f"moves is {moves}; a negotiation needs at least 2: an offer and an answer")
        return cls(rng.randint(1, MOST), rng.randint(1, MOST), moves)

    @property
    def price(self) -> int | None:
        """What was agreed on; None without a deal."""
        return _number(self.said[-2]) if self.said[-1:] == (ACCEPT,) else None

    @property
    def possible(self) -> int:
        """What both together can gain at most."""
        return max(0, self.worth - self.cost)

    def brief(self, seat: str) -> str:
        return f"game negotiate. you are the {seat}."

    def to_act(self) -> tuple[str, ...]:
        if len(self.said) == self.moves or self.said[-1:] in ((ACCEPT,), (WALK,)):
            return ()
        return (self.seats[len(self.said) % 2],)

    def view(self, seat: str) -> str:
        own = f"it is worth {self.worth} to you." if seat == "buyer" else f"it costs you {self.cost}."
        heard = f"they {self.said[-1]}." if self.said else "make an offer."
        return f"{own} {heard}" + (" last word." if len(self.said) == self.moves - 1 else "")

    def answers(self, seat: str) -> tuple[str, ...]:
        if seat not in self.to_act():
            return ()
        accept = (ACCEPT,) if self.said else ()
        offers = tuple(f"offer {price}" for price in range(1, MOST + 1)) if len(self.said) < self.moves - 1 else ()
        return (*offers, *accept, WALK)

    def parse(self, seat: str, text: str) -> str:
        answer, legal = " ".join(words(text)), self.answers(seat)
        if answer not in legal:
            offer = [f"offer and a number from 1 to {MOST}"] if legal[0] != ACCEPT else []
            rest = [each for each in legal if each in (ACCEPT, WALK)]
            raise ValueError(f"not a legal answer. say {', '.join([*offer, *rest[:-1]])} or {rest[-1]}.")
        return answer

    def apply(self, moves: Mapping[str, str]) -> Self:
        answered(self.to_act(), moves)
        ((seat, move),) = moves.items()
        return replace(self, said=(*self.said, self.parse(seat, move)))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError(f"the negotiation is not over: the {self.to_act()[0]} must answer")
        if self.price is None:
            return {"buyer": 0.0, "seller": 0.0}
        return {"buyer": (self.worth - self.price) / MOST, "seller": (self.price - self.cost) / MOST}


def _number(offer: str) -> int:
    return int(offer.split()[1])
