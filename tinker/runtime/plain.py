"""Values as JSON and back, by their type hints: dataclasses, unions, mappings with any keys, sets, tuples.

For what stays on this machine (snapshots of states); messages travel by `tinker.runtime.codec`. The text of equal states is equal: sets
are sorted, mappings keep their order. Bytes are hexadecimal. A dataclass is the list of its fields; a member of a union begins with its
class name. `PlainError` names the type that cannot be written, or what was found instead of it.
"""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Change = Callable[[Any], Any]


class PlainError(Exception):
    """This type has no plain form, or this text is not of the type."""


def to_text(value: Any, kind: Any) -> str:
    """The value as one line of JSON."""
    return json.dumps(_writer(kind)(value), separators=(",", ":"), ensure_ascii=False)


def from_text(text: str, kind: type[T]) -> T:
    """The value again. PlainError if the text is not of this type."""
    try:
        hint: Any = kind
        value: T = _reader(hint)(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise PlainError(f"this is no {kind.__name__}: {type(error).__name__}: {error}") from error
    return value


@cache
def _writer(hint: Any) -> _Change:
    hint = _bare(hint)
    if hint in _ATOMS:
        return _hex if hint is bytes else _same
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str
    if is_dataclass(hint):
        return _dataclass_writer(hint)
    origin, items = get_origin(hint), get_args(hint)
    if origin is tuple:
        if items[-1] is Ellipsis:
            one = _Lazy(_writer, items[0])
            return lambda value: [one(each) for each in value]
        parts = [_Lazy(_writer, item) for item in items]
        return lambda value: [part(each) for part, each in zip(parts, value, strict=True)]
    if origin is frozenset:
        one = _Lazy(_writer, items[0])
        return lambda value: sorted((one(each) for each in value), key=repr)
    if _is_mapping(origin):
        key, item = _Lazy(_writer, items[0]), _Lazy(_writer, int if origin is Counter else items[1])
        return lambda value: [[key(name), item(each)] for name, each in value.items()]
    if origin in (Union, types.UnionType):
        return _union_writer(items)
    raise PlainError(f"a value of type {hint} has no plain form")


@cache
def _reader(hint: Any) -> _Change:
    hint = _bare(hint)
    if hint in _ATOMS:
        return bytes.fromhex if hint is bytes else _same
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    origin, items = get_origin(hint), get_args(hint)
    if origin is tuple:
        if items[-1] is Ellipsis:
            one = _Lazy(_reader, items[0])
            return lambda value: tuple([one(each) for each in value])
        parts = [_Lazy(_reader, item) for item in items]
        return lambda value: tuple([part(each) for part, each in zip(parts, value, strict=True)])
    if origin is frozenset:
        one = _Lazy(_reader, items[0])
        return lambda value: frozenset([one(each) for each in value])
    if _is_mapping(origin):
        key, item = _Lazy(_reader, items[0]), _Lazy(_reader, int if origin is Counter else items[1])
        made: _Change = Counter if origin is Counter else _same
        return lambda value: made({key(name): item(each) for name, each in value})
    if origin in (Union, types.UnionType):
        return _union_reader(items)
    raise PlainError(f"a value of type {hint} has no plain form")


def _dataclass_writer(cls: Any) -> _Change:
    hints = get_type_hints(cls)
    parts = [(each.name, _Lazy(_writer, hints[each.name])) for each in fields(cls)]
    return lambda value: [part(getattr(value, name)) for name, part in parts]


def _dataclass_reader(cls: Any) -> _Change:
    """Fields that the constructor does not take are set afterwards."""
    hints = get_type_hints(cls)
    parts = [(each.name, each.init, _Lazy(_reader, hints[each.name])) for each in fields(cls)]

    def read(value: Any) -> Any:
        values = {name: part(each) for (name, _, part), each in zip(parts, value, strict=True)}
        made = cls(**{name: values[name] for name, init, _ in parts if init})
        for name, init, _ in parts:
            if not init:
                object.__setattr__(made, name, values[name])
        return made

    return read


def _union_writer(items: tuple[Any, ...]) -> _Change:
    if type(None) in items and len(items) == 2:
        inner = _Lazy(_writer, next(item for item in items if item is not type(None)))
        return lambda value: None if value is None else inner(value)
    parts = {item: _Lazy(_writer, item) for item in items}
    return lambda value: None if value is None else [type(value).__name__, parts[type(value)](value)]


def _union_reader(items: tuple[Any, ...]) -> _Change:
    if type(None) in items and len(items) == 2:
        inner = _Lazy(_reader, next(item for item in items if item is not type(None)))
        return lambda value: None if value is None else inner(value)
    parts = {item.__name__: _Lazy(_reader, item) for item in items}
    return lambda value: None if value is None else parts[value[0]](value[1])


class _Lazy:
    """A writer or reader that is made when it is first needed: types may contain each other."""

    __slots__ = ("_change", "_hint", "_make")

    def __init__(self, make: Callable[[Any], _Change], hint: Any) -> None:
        self._make, self._hint = make, hint
        self._change: _Change | None = None

    def __call__(self, value: Any) -> Any:
        if self._change is None:
            self._change = self._make(self._hint)
        return self._change(value)


_ATOMS = (str, int, float, bool, bytes, type(None))


def _bare(hint: Any) -> Any:
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    return type(None) if hint is None else hint


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _same(value: Any) -> Any:
    return value


def _hex(value: bytes) -> str:
    return value.hex()
