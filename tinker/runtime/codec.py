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
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, ValidationError
from pydantic_core import core_schema as schema

from tinker.protocol import VERSION
from tinker.protocol.making import maker
from tinker.protocol.values import PackedFloats, PackedIds

MAX_FRAME = 16 * 1024 * 1024  # bytes of one control message
MAX_ARRAY = 16 * 1024  # items of one array; msgpack reserves their space before it has seen them

_PACKED = (PackedIds, PackedFloats)
_Encoder = Callable[[Any], Any]
_WRITERS: dict[type, _Encoder] = {}
_pack = msgpack.Packer().pack  # runs no code of ours, so no other thread can come in between


class WireError(Exception):
    """These bytes are not a message we accept (the peer is to blame), or this message cannot travel (its sender is)."""


def encode(message: Any) -> bytes:
    """The message's bytes. WireError names the message and the field that cannot travel, or the frame that is too large."""
    kind: Any = type(message)
    try:
        data: bytes = _pack(_WRITERS[kind](message))
    except Exception:
        data = _encode(message)
    if len(data) > MAX_FRAME:
        raise WireError(
            f"cannot send {kind.__name__}: {len(data)} bytes, at most {MAX_FRAME} fit; bulk goes by the data plane"
        )
    return data


def _encode(message: Any) -> bytes:
    """The same for a kind that comes for the first time, and for values that need `_plain`."""
    kind: Any = type(message)
    try:
        write = _WRITERS[kind] = _writer(kind)
        data: bytes = msgpack.packb(write(message), default=_plain)
    except Exception as error:
        raise WireError(f"cannot send {_culprit(message)}: {type(error).__name__}: {error}") from error
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
def _writer(cls: Any) -> _Encoder:
    """From a message to the tuple that msgpack writes."""
    return _class_encoder(cls, f"{VERSION}, {cls.__name__!r}")


def _class_encoder(cls: Any, head: str) -> _Encoder:
    """From an instance to this head and its encoded fields: one expression, compiled from the type hints."""
    return _compiled(lambda scope: f"({head}, {_fields_of(cls, 'value', scope)})")


@cache
def _encoder(hint: Any) -> _Encoder:
    """From a field's value to what msgpack writes."""
    return _compiled(lambda scope: _expression(hint, "value", scope))


def _compiled(make: Callable[[dict[str, Any]], str]) -> _Encoder:
    scope: dict[str, Any] = {}
    encoder: _Encoder = eval(f"lambda value: {make(scope)}", scope)  # noqa: S307 (of our own classes' names)
    return encoder


def _fields_of(cls: Any, value: str, scope: dict[str, Any]) -> str:
    """The fields of the instance that the expression `value` gives, one after the other."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a message")
    hints, names = get_type_hints(cls), [field.name for field in fields(cls)]
    place = value if value.isidentifier() else f"v{len(scope)}"
    scope[place] = None  # its name is taken
    first = [value if value.isidentifier() else f"({place} := {value})", *[place] * len(names)]
    return "".join(
        f"{_expression(hints[name], f'{at}.{name}', scope)}, " for at, name in zip(first, names, strict=False)
    )


def _expression(hint: Any, value: str, scope: dict[str, Any]) -> str:
    """What msgpack writes of the field that the expression `value` gives; itself, if that can be written as it is."""
    if is_dataclass(hint):
        return f"({_fields_of(hint, value, scope)})"
    items = get_args(hint)
    if get_origin(hint) is tuple:
        if items[-1] is Ellipsis:
            each = _expression(items[0], "one", {})
            return value if each == "one" else f"{_named(scope, _list_of(items[0]))}({value})"
        if all(_expression(item, "one", {}) == "one" for item in items):
            return value
        return f"{_named(scope, _row([_encoder(item) for item in items]))}({value})"
    if get_origin(hint) in (Union, types.UnionType):
        if type(None) not in items:
            return f"{_named(scope, _tagged_encoder(items))}({value})"
        scope[place := f"v{len(scope)}"] = None
        inner = _expression(_without_none(hint), place, scope)
        return value if inner == place else f"(None if ({place} := {value}) is None else {inner})"
    return value


def _named(scope: dict[str, Any], encoder: _Encoder) -> str:
    scope[name := f"encode{len(scope)}"] = encoder
    return name


def _list_of(hint: Any) -> _Encoder:
    return _compiled(lambda scope: f"[{_expression(hint, 'one', scope)} for one in value]")


def _row(encoders: list[_Encoder]) -> _Encoder:
    return lambda values: [encode_one(value) for encode_one, value in zip(encoders, values, strict=True)]


def _tagged_encoder(members: tuple[type, ...]) -> _Encoder:
    encoders = {member: _class_encoder(member, repr(member.__name__)) for member in members}
    return lambda value: encoders[type(value)](value)


def _culprit(message: Any) -> str:
    """`Message.field.field` of the first value that cannot be written."""
    cls = type(message)
    if not is_dataclass(cls):
        return cls.__name__
    hints = get_type_hints(cls)
    for field in fields(cls):
        value = getattr(message, field.name)
        try:
            msgpack.packb(_encoder(hints[field.name])(value), default=_plain)
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
    return schema.call_schema(schema.arguments_schema(_parameters(cls)), maker(cls))


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
