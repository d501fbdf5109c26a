"""The parameters of a scenario: what its keyword-only arguments allow, and the check of given values against it.

Allowed types: bool, int, float, str, Literal of those, tuple[T, ...] and unions with None. They survive JSON, so a recording holds them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from scenarios.errors import ScenarioError

PLAIN = (bool, int, float, str, types.NoneType)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One keyword-only argument: its name, type and default."""

    name: str
    kind: Any
    default: object

    def check(self, value: object) -> object:
        """The value as the scenario gets it (an int for a float becomes one, a list for a tuple too), or ScenarioError."""
        try:
            return _fitted(value, self.kind)
        except TypeError:
            raise ScenarioError(
                f"parameter {self.name!r} is {value!r}; allowed is {describe(self.kind)} (default {self.default!r})"
            ) from None


def bind(owner: str, parameters: Iterable[Parameter], given: Mapping[str, object]) -> dict[str, object]:
    """Every parameter with its given or default value. Unknown names and wrong types are refused by name."""
    known = {parameter.name: parameter for parameter in parameters}
    for name in given:
        if name not in known:
            raise ScenarioError(
                f"{owner} has no parameter {name!r}{closest(name, known)}; it has: {', '.join(known) or 'none'}"
            )
    return {
        name: parameter.check(given[name]) if name in given else parameter.default for name, parameter in known.items()
    }


def closest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` if a known name is like this one, else nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def read_parameters(function: Callable[..., object]) -> tuple[Parameter, ...]:
    """The parameters of `async def f(table, *, name: type = default)`, in order; ScenarioError for any other signature."""
    owner = f"scenario function {getattr(function, '__name__', function)!r}"
    positional, keyword_only = [], []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY:
            keyword_only.append(argument)
        elif argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD):
            positional.append(argument)
        else:
            raise ScenarioError(f"{owner} takes {argument}; name every parameter after `*` instead")
    if len(positional) != 1:
        names = ", ".join(argument.name for argument in positional) or "nothing"
        raise ScenarioError(f"{owner} takes {names} by position; expected the table alone, parameters after `*`")
    return tuple(_parameter(owner, argument, function) for argument in keyword_only)


def describe(kind: Any) -> str:
    """What a type allows, in words for an error message or a listing."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple:
        return f"a list of {describe(arguments[0])}"
    return "None" if kind is types.NoneType else str(getattr(kind, "__name__", kind))


def _parameter(owner: str, argument: inspect.Parameter, function: Callable[..., object]) -> Parameter:
    if argument.default is argument.empty:
        raise ScenarioError(
            f"{owner}: parameter {argument.name!r} has no default; give it one, so that the scenario runs as it is"
        )
    if argument.annotation is argument.empty:
        kind: Any = type(argument.default)
    else:
        holder = types.SimpleNamespace(__annotations__={argument.name: argument.annotation})
        try:
            kind = typing.get_type_hints(holder, globalns=function.__globals__)[argument.name]
        except (NameError, TypeError, SyntaxError) as error:
            raise ScenarioError(f"{owner}: the type of parameter {argument.name!r} cannot be read: {error}") from error
    if not _is_allowed(kind):
        raise ScenarioError(
            f"{owner}: parameter {argument.name!r} is a {describe(kind)}; allowed are bool, int, float, str, "
            "Literal, tuple[T, ...] and unions of those with None"
        )
    return Parameter(argument.name, kind, Parameter(argument.name, kind, argument.default).check(argument.default))


def _is_allowed(kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return all(type(option) in PLAIN for option in arguments)
    if origin in (Union, types.UnionType):
        return all(map(_is_allowed, arguments))
    if origin is tuple:
        return len(arguments) == 2 and arguments[1] is Ellipsis and _is_allowed(arguments[0])
    return kind in PLAIN


def _fitted(value: object, kind: Any) -> object:
    """The value as one of `kind`, or TypeError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if any(type(value) is type(option) and value == option for option in arguments):
            return value
    elif origin in (Union, types.UnionType):
        return _fitted_to_one(value, arguments)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_fitted(item, arguments[0]) for item in value)
    elif kind is float:
        if type(value) in (int, float) and math.isfinite(typing.cast(float, value)):
            return float(typing.cast(float, value))
    elif type(value) is kind:
        return value
    raise TypeError


def _fitted_to_one(value: object, kinds: tuple[Any, ...]) -> object:
    """Exact types first, so that an int stays one where float would do as well."""
    for kind in sorted(kinds, key=lambda kind: kind is not type(value)):
        try:
            return _fitted(value, kind)
        except TypeError:
            continue
    raise TypeError
