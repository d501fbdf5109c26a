"""Messages as bytes: one msgpack array `[VERSION, kind, field, ...]`, positional, checked by pydantic when it arrives.

`kind` is the class name. Nested dataclasses are arrays of their fields, members of a union of dataclasses begin with their class name, a
StrEnum is its string, a tuple is an array. A field at the end that has a default may be missing, so that an older peer of the same
`VERSION` is understood. Encoders and validators are compiled once per class, from its type hints.

`WireError` is the only error: `decode` blames the peer with it, `encode` names the message and the field that cannot travel. `encode`
does not check types it can write (that is what the receiver's check is for); numpy scalars and arrays become plain numbers and lists.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, ValidationError
from pydantic_core import core_schema as schema

from tinker.protocol import VERSION
from tinker.protocol.values import PackedFloats, PackedIds

MAX_FRAME = 16 * 1024 * 1024  # bytes of one control message
MAX_ARRAY = 16 * 1024  # items of one array; msgpack reserves their space before it has seen them

_PACKED = (PackedIds, PackedFloats)
_Encoder = Callable[[Any], Any]


class WireError(Exception):
    """These bytes are not a message we accept (the peer is to blame), or this message cannot travel (its sender is)."""


def encode(message: Any) -> bytes:
    """The message's bytes. WireError names the message and the field that cannot travel, or the frame that is too large."""
    kind: Any = type(message)
    try:
        data: bytes = msgpack.packb((VERSION, kind.__name__, *_class_encoder(kind)(message)), default=_plain)
    except Exception as error:
        raise WireError(f"cannot send {_culprit(message)}: {type(error).__name__}: {error}") from error
    if len(data) > MAX_FRAME:
        raise WireError(
            f"cannot send {kind.__name__}: {len(data)} bytes, at most {MAX_FRAME} fit; bulk goes by the data plane"
        )
    return data


def decode(data: bytes, expected: Any) -> Any:
    """The message in `data`, one of `expected` (a message class or a union of them, such as `ToHost`). WireError for anything else."""
    array = _unpack(data)
    version, kind = array[0], array[1]
    if type(version) is not int or version != VERSION:
        raise WireError(
            f"peer speaks version {_harmless(version)}, we speak {VERSION}: run the same major version on both ends"
        )
    cached = _TABLES.get(id(expected))
    table = cached[1] if cached else _table(expected)
    validator = table.get(kind) if type(kind) is str else None
    if validator is None:
        raise WireError(f"unknown kind {_harmless(kind)}: expected one of {', '.join(table)}")
    del array[:2]
    try:
        return validator.validate_python(array)
    except ValidationError as error:
        raise WireError(_reasons(kind, expected, error)) from error
    except Exception as error:  # a constructor refused its arguments
        raise WireError(f"{kind}: {type(error).__name__}: {error}") from error


def _unpack(data: bytes) -> list[Any]:
    """The outer array, at least [version, kind]. Limits are checked before anything is allocated."""
    if len(data) > MAX_FRAME:
        raise WireError(f"frame of {len(data)} bytes: at most {MAX_FRAME} are accepted")
    try:
        array = msgpack.unpackb(
            data,
            object_hook=_no_map,
            max_array_len=min(MAX_ARRAY, len(data)),
            max_map_len=0,
            max_ext_len=0,
        )
    except Exception as error:
        raise WireError(f"not a message: {type(error).__name__}: {error!s:.200}") from error
    if type(array) is not list or len(array) < 2:
        raise WireError("not a message: expected an array that begins with version and kind")
    return array


def _harmless(value: Any) -> str:
    """A number or a name as it is; of anything else a peer sent, our errors, which go to logs, say only what it is."""
    short = type(value) is str and len(value) <= 40 and value.isascii() and value.isidentifier()
    return repr(value) if short or isinstance(value, int | float | None) else f"({type(value).__name__}, no name)"


def _no_map(_: dict[Any, Any]) -> None:
    raise ValueError("messages have no maps")


def _plain(value: Any) -> Any:
    """What numpy puts into a field, as plain Python (called by msgpack for values it cannot write)."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, int):
        raise OverflowError(f"{value:.3g} does not fit into 64 bits")
    raise TypeError(f"{type(value).__name__} cannot be sent")


# --- encoding ---


@cache
def _class_encoder(cls: Any) -> _Encoder:
    """From an instance to the sequence of its encoded fields."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a message")
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    changes = [(at, change) for at, name in enumerate(names) if (change := _encoder(hints[name])) is not None]
    if not names:
        return lambda value: ()
    get = attrgetter(*names)
    if len(names) == 1:
        only = changes[0][1] if changes else None
        return (lambda value: (only(get(value)),)) if only else (lambda value: (get(value),))
    if not changes:
        return get

    def changed(value: Any) -> list[Any]:
        array = list(get(value))
        for at, change in changes:
            array[at] = change(array[at])
        return array

    return changed


def _encoder(hint: Any) -> _Encoder | None:
    """From a field's value to what msgpack writes; None: it is written as it is."""
    if is_dataclass(hint):
        return _class_encoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return _tuple_encoder(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return _optional_encoder(hint) if type(None) in get_args(hint) else _tagged_encoder(get_args(hint))
    return None


def _tuple_encoder(items: tuple[Any, ...]) -> _Encoder | None:
    if items[-1] is Ellipsis:
        each = _encoder(items[0])
        return None if each is None else lambda values: [each(value) for value in values]
    encoders = [_encoder(item) for item in items]
    if not any(encoders):
        return None
    return lambda values: [one(value) if one else value for one, value in zip(encoders, values, strict=True)]


def _optional_encoder(hint: Any) -> _Encoder | None:
    inner = _encoder(_without_none(hint))
    return None if inner is None else lambda value: None if value is None else inner(value)


def _tagged_encoder(members: tuple[type, ...]) -> _Encoder:
    encoders = {member: _class_encoder(member) for member in members}
    return lambda value: (type(value).__name__, *encoders[type(value)](value))


def _culprit(message: Any) -> str:
    """`Message.field.field` of the first value that cannot be written."""
    cls = type(message)
    if not is_dataclass(cls):
        return cls.__name__
    hints = get_type_hints(cls)
    for field in fields(cls):
        value = getattr(message, field.name)
        try:
            encoder = _encoder(hints[field.name])
            msgpack.packb(encoder(value) if encoder else value, default=_plain)
        except Exception:  # whatever it is: we are looking for the field to name
            inner = _culprit(value).partition(".")[2] if is_dataclass(value) else ""
            return f"{cls.__name__}.{field.name}" + (f".{inner}" if inner else "")
    return cls.__name__


# --- decoding ---

_TABLES: dict[
    int, tuple[Any, dict[str, SchemaValidator]]
] = {}  # by id of the expected type, which the entry keeps alive


def _table(expected: Any) -> dict[str, SchemaValidator]:
    table = {cls.__name__: _validator(cls) for cls in _members(expected)}
    _TABLES[id(expected)] = (expected, table)
    return table


@cache
def _validator(cls: type) -> SchemaValidator:
    return SchemaValidator(_class_schema(cls))


def _members(expected: Any) -> tuple[type, ...]:
    return get_args(expected) or (expected,)


@cache
def _class_schema(cls: type) -> CoreSchema:
    """An array of the fields, then the class called with them."""
    return schema.call_schema(schema.arguments_schema(_parameters(cls)), cls)


def _tagged_schema(cls: type) -> CoreSchema:
    """The same with the class name in front."""
    tag = schema.arguments_parameter("kind", schema.literal_schema([cls.__name__]), mode="positional_only")
    return schema.call_schema(schema.arguments_schema([tag, *_parameters(cls)]), lambda _, *values: cls(*values))


def _parameters(cls: type) -> list[schema.ArgumentsParameter]:
    hints = get_type_hints(cls)
    parameters = []
    for field in fields(cls):
        kind = _schema(hints[field.name])
        if field.default is not MISSING:
            kind = schema.with_default_schema(kind, default=field.default)
        parameters.append(schema.arguments_parameter(field.name, kind, mode="positional_only"))
    return parameters


_SCALARS: dict[Any, CoreSchema] = {
    str: schema.str_schema(strict=True),
    int: schema.int_schema(strict=True),
    float: schema.float_schema(strict=True),
    bool: schema.bool_schema(strict=True),
    bytes: schema.bytes_schema(strict=True),
}


def _schema(hint: Any) -> CoreSchema:
    if hint in _PACKED:
        return schema.no_info_after_validator_function(_whole_numbers, _SCALARS[bytes])
    if isinstance(hint, NewType):
        return _schema(hint.__supertype__)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return _class_schema(hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return schema.chain_schema([_SCALARS[str], schema.enum_schema(hint, list(hint), sub_type="str")])
    if get_origin(hint) is tuple:
        return _tuple_schema(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        if type(None) in get_args(hint):
            return schema.nullable_schema(_schema(_without_none(hint)))
        choices = {member.__name__: _tagged_schema(member) for member in get_args(hint)}
        return schema.tagged_union_schema(choices, discriminator=_tag)
    raise TypeError(f"a message field of type {hint} cannot travel")


def _tuple_schema(items: tuple[Any, ...]) -> CoreSchema:
    """Not strict itself: msgpack makes lists of arrays."""
    if items[-1] is Ellipsis:
        return schema.tuple_schema([_schema(items[0])], variadic_item_index=0)
    return schema.tuple_schema([_schema(item) for item in items])


def _without_none(hint: Any) -> Any:
    rest = [member for member in get_args(hint) if member is not type(None)]
    return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007


def _whole_numbers(packed: bytes) -> bytes:
    if len(packed) % 4:
        raise PydanticCustomError(
            "packed_length", "packed numbers take 4 bytes each, got {length} bytes", {"length": len(packed)}
        )
    return packed


def _tag(value: Any) -> str | None:
    return value[0] if type(value) is list and value and type(value[0]) is str else None


def _reasons(kind: str, expected: Any, error: ValidationError) -> str:
    """The first few complaints, each with its field's name."""
    names = next([field.name for field in fields(cls)] for cls in _members(expected) if cls.__name__ == kind)
    details = error.errors(include_url=False, include_input=False, include_context=False)
    lines = []
    for detail in details[:3]:
        place = list(detail["loc"])
        if place and isinstance(place[0], int):
            place[0] = names[place[0]] if place[0] < len(names) else f"argument {place[0]}"
        lines.append(f"{'.'.join(map(str, [kind, *place]))}: {detail['msg']:.200}")
    more = f" (and {len(details) - 3} more)" if len(details) > 3 else ""
    return "; ".join(lines) + more
