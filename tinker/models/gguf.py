"""Reading a GGUF file: its metadata as plain values, its tensors as fp32 arrays.

Only what small dense models need: version 2 or 3, little endian, the types F32, F16, Q4_0, Q4_1 and Q8_0. A quantized tensor is blocks of
32 numbers that share a scale (and, in Q4_1, an offset); the two halves of a block lie in the low and the high four bits of its bytes.
Format: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32  # numbers in a quantized block
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9


class GgufError(Exception):
    """The file is not one that can be read here: get it again, or use another one."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """`metadata` by key, `tensors` by name with the shape [rows, ..., columns] that they have in memory."""

    metadata: dict[str, Any]
    tensors: dict[str, Floats]


def read_gguf(path: Path) -> Gguf:
    """Everything in the file; GgufError for what it does not understand, damaged files included."""
    with path.open("rb") as file:
        if path.stat().st_size < 24 or file.read(4) != b"GGUF":
            raise GgufError(f"{path} is no GGUF file; get it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(data)
            except (struct.error, ValueError, KeyError, UnicodeDecodeError) as error:
                raise GgufError(f"{path} is damaged ({type(error).__name__}: {error}); get it again") from error


def _read(data: mmap.mmap) -> Gguf:
    cursor = Cursor(data)
    version = cursor.number("<I")
    if version not in (2, 3):
        raise GgufError(f"the file is GGUF of version {version}; expected 2 or 3")
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    metadata = {cursor.text(): cursor.value(cursor.number("<I")) for _ in range(keys)}
    infos = [cursor.info() for _ in range(tensors)]
    align = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // align) * align
    return Gguf(metadata, {name: _tensor(data, start + offset, kind, shape) for name, shape, kind, offset in infos})


class Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.at = 4  # behind the magic
        self._data = data

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.number("<Q")
        if size > len(self._data) - self.at:
            raise ValueError(f"a string of {size} bytes reaches beyond the end")
        self.at += size
        return self._data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(NUMBERS[kind])

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor. The file counts dimensions from the last one."""
        name = self.text()
        shape = tuple(self.number("<Q") for _ in range(self.number("<I")))
        return name, shape[::-1], self.number("<I"), self.number("<Q")


def _tensor(data: mmap.mmap, offset: int, kind: int, shape: tuple[int, ...]) -> Floats:
    if kind not in TYPES:
        raise GgufError(f"the file holds tensors of ggml type {kind}; readable are {', '.join(map(str, TYPES))}")
    numbers, size, unpack = TYPES[kind]
    count = math.prod(shape)
    if count % numbers:
        raise ValueError(f"{count} numbers are no whole blocks of {numbers}")
    blocks = np.frombuffer(data, np.uint8, count // numbers * size, offset).reshape(-1, size)
    return unpack(blocks).reshape(shape)


def _half(blocks: Bytes, at: int) -> Floats:
    """A half-precision number per block, [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _f32(blocks: Bytes) -> Floats:
    return blocks.copy().view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.copy().view("<f2").astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]) - np.float32(8)) * _half(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].copy().view(np.int8).astype(np.float32) * _half(blocks, 0)


# By ggml's number: how many numbers a block has, of how many bytes it consists, how they are read.
TYPES: dict[int, tuple[int, int, Callable[[Bytes], Floats]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    2: (BLOCK, 18, _q4_0),
    3: (BLOCK, 20, _q4_1),
    8: (BLOCK, 34, _q8_0),
}
