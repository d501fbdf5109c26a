"""What a game is: a frozen value that says who must act, what each seat sees, and which game follows from a move.

A new game subclasses `Game` as a frozen dataclass; `envs.conformance.check_game` then proves that it keeps the promises below.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, Self, TypeVar

Move = TypeVar("Move")


class Game(ABC, Generic[Move]):
    """One position of a game. Nothing changes it; `apply` returns the next one. The same start and moves give the same game.

    A move is whatever `parse` returns. Illegal text and illegal moves raise ValueError and are otherwise without effect: what an
    illegal answer costs is decided by whoever plays the game, not by its rules.
    """

    __slots__ = ()

    seats: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def start(cls, rng: random.Random) -> Self:
        """The first position; `rng` is the only randomness. A game may take further keyword arguments with defaults."""

    @abstractmethod
    def brief(self, seat: str) -> str:
        """Standing instructions: the rules this seat must know and how it must answer."""

    @abstractmethod
    def to_act(self) -> tuple[str, ...]:
        """The seats that must act now, in seat order; several act at once and unseen. Empty when the game is over."""

    @abstractmethod
    def view(self, seat: str) -> str:
        """All that this seat may know of the position, as the prompt for its next answer. Works for every seat at any time."""

    @abstractmethod
    def answers(self, seat: str) -> tuple[str, ...]:
        """Legal answers of this seat now, as texts that `parse` accepts; empty exactly when the seat is not to act."""

    @abstractmethod
    def parse(self, seat: str, text: str) -> Move:
        """The move that this text means. ValueError, with a message for the player, when it means none or an illegal one."""

    @abstractmethod
    def apply(self, moves: Mapping[str, Move]) -> Self:
        """The position after these moves: exactly one for each seat of `to_act`. ValueError when that is not so, or a move is illegal."""

    @abstractmethod
    def scores(self) -> Mapping[str, float]:
        """What each seat earned in the whole game. ValueError while the game is not over."""

    def finished(self) -> frozenset[str]:
        """The seats that will never act again. Games whose seats leave at different times say so here."""
        return frozenset() if self.to_act() else frozenset(self.seats)


def answered(seats: tuple[str, ...], moves: Mapping[str, object]) -> None:
    """ValueError unless `moves` has exactly one move for each of `seats`."""
    if set(moves) != set(seats):
        raise ValueError(f"moves came from {sorted(moves)}, but {list(seats)} must act: apply one move of each")


def words(text: str) -> list[str]:
    """The words of an answer, as every game here reads them: without case, outer space and a final full stop."""
    return text.strip().lower().removesuffix(".").split()
