"""The shipped conformance check: the games here pass it, and for each promise a game that breaks it is caught."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import pytest

from envs import Dilemma, Game, Guess, Nim, conformance
from envs.conformance import check_game
from envs.game import answered


@pytest.mark.parametrize(
    ("game", "total", "params"),
    [
        (Guess, (0.0, 2.0), {}),
        (Guess, (0.0, 2.0), {"secret_max": 100, "tries": 7}),
        (Nim, (0.0, 0.0), {}),
        (Nim, (0.0, 0.0), {"pile_min": 1, "pile_max": 30}),
        (Dilemma, (0.4, 1.2), {}),
        (Dilemma, (0.4, 1.2), {"payoff": "shared", "rounds": 7}),
    ],
)
def test_the_games_here_keep_their_promises(
    game: type[Game[Any]], total: tuple[float, float], params: dict[str, Any]
) -> None:
    check_game(game, range(30), total=total, **params)


@dataclass(frozen=True, slots=True)
class Countdown(Game[str]):
    """Everybody says a letter in turn; a and b leave after two letters each, c and d after four."""

    said: tuple[str, ...] = ()
    first: str = "x"

    seats: ClassVar[tuple[str, ...]] = ("a", "b", "c", "d")
    turns: ClassVar[tuple[str, ...]] = tuple("abcdabcdcdcd")

    @classmethod
    def start(cls, rng: random.Random) -> Self:
        return cls(first=rng.choice("xy"))

    def brief(self, seat: str) -> str:
        return f"you are {seat}"

    def to_act(self) -> tuple[str, ...]:
        return self.turns[len(self.said) : len(self.said) + 1]

    def finished(self) -> frozenset[str]:
        return frozenset(self.seats) - set(self.turns[len(self.said) :])

    def view(self, seat: str) -> str:
        return f"letters so far: {' '.join(self.said)}, first {self.first}"

    def answers(self, seat: str) -> tuple[str, ...]:
        return ("x", "y") if seat in self.to_act() else ()

    def parse(self, seat: str, text: str) -> str:
        if text not in ("x", "y"):
            raise ValueError("say x or y")
        return text

    def apply(self, moves: Mapping[str, str]) -> Self:
        answered(self.to_act(), moves)
        return replace(self, said=(*self.said, *moves.values()))

    def scores(self) -> Mapping[str, float]:
        if self.to_act():
            raise ValueError("not over")
        return dict.fromkeys(self.seats, 0.0)


def test_seats_may_leave_at_different_times_without_changing_the_order() -> None:
    check_game(Countdown, range(20))


def test_nothing_is_asked_of_a_seat_after_it_finished() -> None:
    game = Countdown()
    asked = []
    while game.to_act():
        assert not game.finished() & set(game.to_act())
        asked.append(game.to_act()[0])
        game = game.apply({game.to_act()[0]: "x"})
    assert "".join(asked) == "abcdabcdcdcd"


class Thawed(Countdown):
    __setattr__ = object.__setattr__


@dataclass(frozen=True)
class ListInside(Countdown):
    letters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RemembersInside(Countdown):
    log: tuple[str, ...] = ()

    def apply(self, moves: Mapping[str, str]) -> Self:
        object.__setattr__(self, "log", (*self.log, *moves.values()))
        return super().apply(moves)


class RollsItsOwnDice(Countdown):
    dice: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def start(cls, rng: random.Random) -> Self:
        return cls(first=str(cls.dice.random()))


class RemembersTheLastEpisode(Countdown):
    history: ClassVar[list[str]] = []

    def apply(self, moves: Mapping[str, str]) -> Self:
        self.history.extend(moves.values())
        return super().apply(moves)

    def view(self, seat: str) -> str:
        return f"all letters ever: {''.join(self.history)}"


class FirstComesFirst(Countdown):
    turns: ClassVar[tuple[str, ...]] = tuple("abcd")

    def to_act(self) -> tuple[str, ...]:
        return self.turns[len(self.said) :]


class TakesAnything(Countdown):
    def parse(self, seat: str, text: str) -> str:
        return text


class RaisesKeyError(Countdown):
    def parse(self, seat: str, text: str) -> str:
        return {"x": "x", "y": "y"}[text]


class TakesMovesOfStrangers(Countdown):
    def apply(self, moves: Mapping[str, str]) -> Self:
        return replace(self, said=(*self.said, moves[self.to_act()[0]])) if moves else super().apply(moves)


class OffersWhatItRefuses(Countdown):
    def answers(self, seat: str) -> tuple[str, ...]:
        return ("x", "z") if seat in self.to_act() else ()


class SilentSeat(Countdown):
    def answers(self, seat: str) -> tuple[str, ...]:
        return ()


class BlindWhenWaiting(Countdown):
    def view(self, seat: str) -> str:
        return dict.fromkeys(self.to_act(), "your turn")[seat]


class EmptyView(Countdown):
    def view(self, seat: str) -> str:
        return ""


class AsksAStranger(Countdown):
    turns: ClassVar[tuple[str, ...]] = ("a", "e")


class AsksAFinishedSeat(Countdown):
    def finished(self) -> frozenset[str]:
        return Countdown.finished(self) | {"a"} if self.said else frozenset()


class ForgetsWhoFinished(Countdown):
    def finished(self) -> frozenset[str]:
        return Countdown.finished(self) - ({"a"} if len(self.said) == 7 else set())


class NobodyLeft(Countdown):
    def finished(self) -> frozenset[str]:
        return frozenset()


class GoesOnForEver(Countdown):
    turns: ClassVar[tuple[str, ...]] = ("a",) * 2000


class ScoresAnyTime(Countdown):
    def scores(self) -> Mapping[str, float]:
        return dict.fromkeys(self.seats, 0.0)


class Scored(Countdown):
    """Countdown with other scores at the end."""

    def final(self) -> Mapping[str, float]:
        return {}

    def scores(self) -> Mapping[str, float]:
        return super().scores() and self.final()


class ForgetsTheLosers(Scored):
    def final(self) -> Mapping[str, float]:
        return {"d": 1.0}


class NotANumber(Scored):
    def final(self) -> Mapping[str, float]:
        return dict.fromkeys(self.seats, float("nan"))


class PaysTheWinnerOnly(Scored):
    def final(self) -> Mapping[str, float]:
        return {**dict.fromkeys(self.seats, 0.0), "d": 1.0}


class PaysAtEveryLook(Scored):
    looks: ClassVar[list[int]] = []

    def final(self) -> Mapping[str, float]:
        self.looks.append(1)
        return {**dict.fromkeys(self.seats, 0.0), "a": len(self.looks), "b": -len(self.looks)}


@pytest.mark.parametrize(
    ("game", "violation"),
    [
        (Thawed, conformance.NotFrozen),
        (ListInside, conformance.NotFrozen),
        (RemembersInside, conformance.OldValueChanged),
        (RollsItsOwnDice, conformance.NotDeterministic),
        (RemembersTheLastEpisode, conformance.NotDeterministic),
        (FirstComesFirst, conformance.OrderMatters),
        (TakesAnything, conformance.IllegalMoveTaken),
        (RaisesKeyError, conformance.IllegalMoveTaken),
        (TakesMovesOfStrangers, conformance.IllegalMoveTaken),
        (OffersWhatItRefuses, conformance.LegalMoveRefused),
        (SilentSeat, conformance.AnswersDisagree),
        (BlindWhenWaiting, conformance.ViewFailed),
        (EmptyView, conformance.ViewFailed),
        (AsksAStranger, conformance.UnknownSeat),
        (AsksAFinishedSeat, conformance.FinishedSeatAsked),
        (ForgetsWhoFinished, conformance.FinishedSeatAsked),
        (NobodyLeft, conformance.FinishedSeatAsked),
        (GoesOnForEver, conformance.NeverEnds),
        (ScoresAnyTime, conformance.ScoresTooEarly),
        (ForgetsTheLosers, conformance.ScoresWrong),
        (NotANumber, conformance.ScoresWrong),
        (PaysTheWinnerOnly, conformance.ScoresWrong),
        (PaysAtEveryLook, conformance.ScoresWrong),
    ],
    ids=lambda value: value.__name__,
)
def test_a_broken_promise_is_named(game: type[Game[Any]], violation: type[conformance.Violation]) -> None:
    with pytest.raises(violation) as caught:
        check_game(game, range(5), total=(0.0, 0.0))
    assert type(caught.value) is violation
    assert game.__name__ in str(caught.value)
