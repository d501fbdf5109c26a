"""Numbers as scenario code writes them (Python, numpy or one-element arrays) made plain floats at the scenario's own line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scenarios.errors import ScenarioError


def plain(value: object) -> float | None:
    """The value as a float; None for None, NaN and infinities. TypeError if it is no number at all."""
    if hasattr(value, "item"):  # numpy and torch scalars, and arrays of one element
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise TypeError from None
    if value is None:
        return None
    if not hasattr(value, "__float__"):
        raise TypeError
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def read_measure(name: object, value: object) -> float:
    """A measure's value; ScenarioError naming the measure if it is not a finite number."""
    if not isinstance(name, str) or not name:
        raise ScenarioError(f"a measure is named {name!r}; expected a non-empty string")
    try:
        number = plain(value)
    except TypeError:
        raise ScenarioError(f"measure {name!r} is {_shown(value)}; expected one number") from None
    if number is None:
        raise ScenarioError(
            f"measure {name!r} is {_shown(value)}; expected a finite number (leave out what is not known)"
        )
    return number


def read_scores(returned: object, seats: Sequence[str]) -> tuple[dict[str, float], int]:
    """The finite scores in seat order, and how many were None, NaN or infinite. ScenarioError if it is not one number per seat."""
    if not isinstance(returned, Mapping):
        raise ScenarioError(
            f"the scenario returned {_shown(returned)}; expected a score per seat, like {dict.fromkeys(seats, 0.0)}"
        )
    missing = [seat for seat in seats if seat not in returned]
    unknown = [repr(key) for key in returned if key not in seats]
    if missing or unknown:
        found = [f"no score for {', '.join(missing)}"] * bool(missing) + [f"a score for {', '.join(unknown)}"] * bool(
            unknown
        )
        raise ScenarioError(
            f"the scenario returned {' and '.join(found)}; expected exactly one for each of {', '.join(seats)}"
        )
    scores: dict[str, float] = {}
    for seat in seats:
        try:
            number = plain(returned[seat])
        except TypeError:
            raise ScenarioError(
                f"the score of seat {seat!r} is {_shown(returned[seat])}; expected one number"
            ) from None
        if number is not None:
            scores[seat] = number
    return scores, len(seats) - len(scores)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:200]} ({type(value).__name__})" if value is not None else "None"
