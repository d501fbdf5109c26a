"""Tensors of safetensors files as SGLang reads them from a request: base64 of a pickle of torch tensors, made without torch.

SGLang takes pickled tensors for adapters (`{name: tensor}`) and whole models (`[(name, tensor)]`), read by an unpickler that knows few
names. The names that are needed are written here as text, so a task server without an update pool needs no torch.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

_STORAGES = {  # of safetensors' element types: torch's storage class, bytes per element
    "F64": ("DoubleStorage", 8),
    "F32": ("FloatStorage", 4),
    "F16": ("HalfStorage", 2),
    "BF16": ("BFloat16Storage", 2),
    "I64": ("LongStorage", 8),
    "I32": ("IntStorage", 4),
    "I8": ("CharStorage", 1),
    "U8": ("ByteStorage", 1),
}
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # how torch recognises a saved storage
_SYSTEM = {"protocol_version": _PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """`data`: the elements, little-endian, rows first. `kind`: safetensors' name of the element type."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class _Named:
    """Something of another program, by module and name. (Callable, because pickle insists.)"""

    module: str
    name: str

    def __call__(self) -> None: ...


_REBUILD = _Named("torch._utils", "_rebuild_tensor_v2")
_LOAD = _Named("torch.storage", "_load_from_bytes")


@dataclass(frozen=True, eq=False)
class _Storage:
    kind: str
    data: bytes


class _Pickler(pickle._Pickler):  # the one in Python: it can be told how to write a name
    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case _Named():
                return obj.name
            case RawTensor():
                storage = _Storage(obj.kind, obj.data)
                return _REBUILD, (storage, 0, obj.shape, _strides(obj.shape), False, OrderedDict())
            case _Storage():
                return _LOAD, (_saved(obj),)
        return NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not isinstance(obj, _Named):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


class _StoragePickler(_Pickler):
    """The innermost pickle of a saved storage names it by reference only; its bytes follow."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        name, width = _STORAGES[obj.kind]
        return "storage", _Named("torch", name), "0", "cpu", len(obj.data) // width, None


def pickled(tensors: dict[str, RawTensor] | list[tuple[str, RawTensor]]) -> bytes:
    """What torch's own `pickle.dumps` would give for these tensors, to whoever reads it."""
    out = io.BytesIO()
    _Pickler(out, protocol=3).dump(tensors)
    return out.getvalue()


def read_safetensors(file: BinaryIO) -> Iterator[tuple[str, RawTensor]]:
    """Every tensor of a safetensors file, in the order of its bytes, one at a time in memory. ValueError if it is none."""
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    header = json.loads(_exactly(file, length))
    header.pop("__metadata__", None)
    start = 8 + length
    for name, each in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = each["data_offsets"]
        if each["dtype"] not in _STORAGES:
            raise ValueError(f"tensor {name} has elements of type {each['dtype']}, which cannot be sent")
        file.seek(start + begin)
        yield name, RawTensor(each["dtype"], tuple(each["shape"]), _exactly(file, end - begin))


def in_buckets(tensors: Iterable[tuple[str, RawTensor]], size: int) -> Iterator[list[tuple[str, RawTensor]]]:
    """Cut so that no bucket exceeds `size` bytes, unless one tensor does."""
    bucket: list[tuple[str, RawTensor]] = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + len(tensor.data) > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += len(tensor.data)
    if bucket:
        yield bucket


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ValueError(f"a safetensors file ends after {len(data)} of {count} bytes")
    return data


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _saved(storage: _Storage) -> bytes:
    """As `torch.save` writes a storage in its older format."""
    out = io.BytesIO()
    for header in (_MAGIC, _PROTOCOL, _SYSTEM):
        pickle.dump(header, out, protocol=2)
    _StoragePickler(out, protocol=2).dump(storage)
    pickle.dump(["0"], out, protocol=2)
    out.write(struct.pack("<q", len(storage.data) // _STORAGES[storage.kind][1]))
    out.write(storage.data)
    return out.getvalue()
