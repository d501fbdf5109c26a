"""The check a game must pass: `check_game(MyGame, seeds)` plays it at random and raises the promise that it broke.

Use it in a test of your own game:

    def test_my_game_keeps_its_promises():
        check_game(MyGame, range(50), total=(0.0, 0.0))

Every violation is an error of its own, so that a test of the check can say which one it expects.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from envs.game import Game

NONSENSE = ("", " ", "no such answer", "\n", "\x00", "-1", "9" * 40)


class Violation(AssertionError):
    """The game broke a promise of `envs.game.Game`; the message says at which position."""


class NotFrozen(Violation):
    """A position can be changed, or cannot be hashed."""


class OldValueChanged(Violation):
    """Asking about a position, or applying moves to it, changed it."""


class NotDeterministic(Violation):
    """The same seed and answers gave another game: hidden randomness, or something left over from an earlier one."""


class OrderMatters(Violation):
    """Moves made at the same time gave another position when they were handed over in another order."""


class IllegalMoveTaken(Violation):
    """Nonsense was parsed, or moves of the wrong seats were applied, instead of ValueError."""


class LegalMoveRefused(Violation):
    """One of the game's own `answers` did not parse, or did not apply."""


class AnswersDisagree(Violation):
    """`answers` is empty for a seat that must act, or not empty for one that must not."""


class ViewFailed(Violation):
    """`view` or `brief` raised, or gave something that is not text."""


class UnknownSeat(Violation):
    """`seats` is empty or repeats a name, or `to_act` or `finished` names a stranger, repeats a seat or breaks seat order."""


class FinishedSeatAsked(Violation):
    """A seat was asked to act, or came back, after it had finished."""


class NeverEnds(Violation):
    """The game was not over after the most moves that it was given."""


class ScoresTooEarly(Violation):
    """`scores` gave scores while seats still had to act."""


class ScoresWrong(Violation):
    """Scores miss a seat, name a stranger, are not finite, change when read again, or add up to more or less than declared."""


def check_game(
    game: type[Game[Any]],
    seeds: Iterable[int],
    *,
    longest: int = 1000,
    total: tuple[float, float] = (-math.inf, math.inf),
    nonsense: Sequence[str] = NONSENSE,
    **params: Any,
) -> None:
    """Plays one random game per seed and raises the first `Violation`.

    `longest` is the most turns a game may take, `total` the bounds of the sum of all scores ((0, 0) for a zero-sum game),
    `nonsense` what nobody may ever answer (empty for a game of free text); `params` go to `start`.
    """
    for seed in seeds:
        first, second = (list(_positions(game, seed, longest, nonsense, params)) for _ in range(2))
        if first != second:
            raise NotDeterministic(
                f"{game.__name__}: seed {seed} gave two different games; `start(rng)` may use only its rng"
            )
        _check_scores(first[-1][0], total, f"{game.__name__}, seed {seed}, at {first[-1][0]!r}")


def _positions(
    game: type[Game[Any]], seed: int, longest: int, nonsense: Sequence[str], params: Mapping[str, Any]
) -> Iterator[tuple[Game[Any], tuple[str, ...]]]:
    """One random game: every position, checked, with what each seat sees of it."""
    choices = random.Random(f"answers {seed}")
    position = game.start(random.Random(seed), **params)
    finished: frozenset[str] = frozenset()
    for _ in range(longest + 1):
        where = f"{game.__name__}, seed {seed}, at {position!r}"
        finished = _check_seats(position, finished, where)
        _check_frozen(position, where)
        before = copy.deepcopy(position)
        yield position, _views(position, where)
        if not position.to_act():
            _check_unchanged(position, before, where)
            return
        moves = _moves(position, choices, where)
        _check_refusals(position, moves, nonsense, where)
        position = _following(position, before, moves, where)
    raise NeverEnds(f"{where}: not over after {longest} turns; make the game end, or raise `longest`")


def _check_seats(position: Game[Any], finished: frozenset[str], where: str) -> frozenset[str]:
    """Who acts is known, in seat order, has answers to give and has not finished. Returns who has finished by now."""
    seats, acting, gone = position.seats, position.to_act(), position.finished()
    if not seats or len(set(seats)) < len(seats):
        raise UnknownSeat(f"{where}: `seats` is {seats}; it must name at least one seat, and each once")
    if acting != tuple(seat for seat in seats if seat in acting) or not gone <= set(seats):
        raise UnknownSeat(
            f"{where}: to_act {acting} and finished {sorted(gone)} must be taken from {seats}, in that order"
        )
    if back := finished - gone | gone & set(acting):
        raise FinishedSeatAsked(f"{where}: {sorted(back)} had finished and may not act again")
    if not acting and gone != set(seats):
        raise FinishedSeatAsked(
            f"{where}: nobody must act, so all of {seats} have finished; `finished` says {sorted(gone)}"
        )
    for seat in seats:
        if bool(position.answers(seat)) != (seat in acting):
            raise AnswersDisagree(f"{where}: answers({seat!r}) is {position.answers(seat)}, and {acting} must act")
    return gone


def _check_frozen(position: Game[Any], where: str) -> None:
    try:
        hash(position)
    except TypeError as error:
        raise NotFrozen(f"{where}: {error}; use tuples and frozensets") from error
    for name in _fields(position):
        try:
            setattr(position, name, getattr(position, name))
        except AttributeError:
            continue
        raise NotFrozen(f"{where}: its field {name!r} can be set; make the class a frozen dataclass")


def _fields(position: Game[Any]) -> list[str]:
    if dataclasses.is_dataclass(position):
        return [field.name for field in dataclasses.fields(position)]
    return list(getattr(position, "_fields", getattr(position, "__dict__", ())))


def _views(position: Game[Any], where: str) -> tuple[str, ...]:
    """What every seat sees; each must be text, at any time."""
    try:
        seen = tuple(text for seat in position.seats for text in (position.brief(seat), position.view(seat)))
    except Exception as error:
        raise ViewFailed(
            f"{where}: `brief` or `view` raised {error!r}; both must work for every seat at any time"
        ) from error
    if not all(isinstance(text, str) and text for text in seen):
        raise ViewFailed(f"{where}: `brief` and `view` gave {seen}; each must be a text that is not empty")
    return seen


def _moves(position: Game[Any], choices: random.Random, where: str) -> dict[str, object]:
    """One random legal move for everybody who must act; every legal answer is parsed on the way."""
    try:
        parsed = {seat: [position.parse(seat, text) for text in position.answers(seat)] for seat in position.to_act()}
    except ValueError as error:
        raise LegalMoveRefused(f"{where}: `parse` refused one of its `answers`: {error}") from error
    return {seat: choices.choice(possible) for seat, possible in parsed.items()}


def _check_refusals(position: Game[Any], moves: Mapping[str, object], nonsense: Sequence[str], where: str) -> None:
    """Nonsense, missing moves, strangers' moves and early questions about scores are all refused with ValueError."""
    acting = position.to_act()
    stranger = next((seat for seat in position.seats if seat not in acting), "a stranger")
    extra = {**moves, stranger: moves[acting[0]]}
    for text in nonsense:
        _refused(IllegalMoveTaken, f"{where}: parse({acting[0]!r}, {text!r})", partial(position.parse, acting[0], text))
    _refused(IllegalMoveTaken, f"{where}: apply with no moves", partial(position.apply, {}))
    _refused(IllegalMoveTaken, f"{where}: apply with a move of {stranger}", partial(position.apply, extra))
    _refused(ScoresTooEarly, f"{where}: scores while {acting} must act", position.scores)


def _refused(violation: type[Violation], what: str, call: Callable[[], object]) -> None:
    try:
        taken = call()
    except ValueError:
        return
    except Exception as error:
        raise violation(f"{what} raised {error!r}; it must raise ValueError") from error
    raise violation(f"{what} gave {taken!r}; it must raise ValueError")


def _following(position: Game[Any], before: Game[Any], moves: dict[str, object], where: str) -> Game[Any]:
    """The position after these moves, whatever their order."""
    try:
        following = position.apply(moves)
        _check_unchanged(position, before, where)
        reordered = position.apply(dict(reversed(moves.items())))
    except ValueError as error:
        raise LegalMoveRefused(f"{where}: `apply` refused the legal moves {moves}: {error}") from error
    if following != reordered:
        raise OrderMatters(f"{where}: {moves} gave {following!r}, and in another order {reordered!r}")
    return following


def _check_unchanged(position: Game[Any], before: Game[Any], where: str) -> None:
    if position != before:
        raise OldValueChanged(f"{where}: it is now {position!r}; looking at it and playing on must not change it")


def _check_scores(position: Game[Any], total: tuple[float, float], where: str) -> None:
    scores, again = dict(position.scores()), dict(position.scores())
    if set(scores) != set(position.seats) or not all(math.isfinite(score) for score in scores.values()):
        raise ScoresWrong(f"{where}: scores are {scores}; they must be one finite number for each of {position.seats}")
    if scores != again:
        raise ScoresWrong(
            f"{where}: scores were {scores}, then {again}; they are totals, and reading them changes nothing"
        )
    if not total[0] - 1e-9 <= sum(scores.values()) <= total[1] + 1e-9:
        raise ScoresWrong(
            f"{where}: scores {scores} add up to {sum(scores.values())}; declared: between {total[0]} and {total[1]}"
        )
