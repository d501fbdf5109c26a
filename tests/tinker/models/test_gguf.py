"""GGUF files: read right, or refused. The files are written here, from the format's description."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tinker.models.gguf import GgufError, read_gguf

KINDS = {int: 10, float: 6, bool: 7, str: 8}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def item(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<?", value)
    if isinstance(value, int):
        return struct.pack("<Q", value)
    return struct.pack("<f", value) if isinstance(value, float) else text(str(value))


def entry(key: str, value: object) -> bytes:
    if isinstance(value, list):
        kind = KINDS[type(value[0])]
        return text(key) + struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(item, value))
    return text(key) + struct.pack("<I", KINDS[type(value)]) + item(value)


def gguf(metadata: dict[str, object], tensors: Sequence[tuple[str, tuple[int, ...], int, bytes]]) -> bytes:
    """A file of version 3. Tensors: name, shape as in memory, ggml's type, bytes."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items())
    body = b""
    for name, shape, kind, data in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + body


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    told = {"a.int": 7, "a.float": 0.5, "a.flag": True, "a.text": "grüß", "a.list": ["x", "y z"], "a.numbers": [1, 2]}
    (tmp_path / "m").write_bytes(gguf(told, []))
    assert read_gguf(tmp_path / "m").metadata == told


def test_tensors_are_unpacked_as_the_format_says(tmp_path: Path) -> None:
    """One block each, worked by hand: low nibbles are the first half, q4_0 is centred at 8, q4_1 has an offset, q8_0 is signed."""
    nibbles = bytes(n | ((15 - n) << 4) for n in range(16))
    low_then_high = np.array([*range(16), *range(15, -1, -1)], np.float32)
    halves = np.array([0.5, -2.0], "<f2").tobytes()
    signed = np.arange(-16, 16, dtype=np.int8)
    plain = np.arange(6, dtype="<f4").reshape(2, 3)
    file = gguf(
        {},
        [
            ("f32", (2, 3), 0, plain.tobytes()),
            ("f16", (2, 3), 1, plain.astype("<f2").tobytes()),
            ("q4_0", (1, 32), 2, halves[:2] + nibbles),
            ("q4_1", (1, 32), 3, halves + nibbles),
            ("q8_0", (32,), 8, halves[:2] + signed.tobytes()),
        ],
    )
    (tmp_path / "m").write_bytes(file)
    found = read_gguf(tmp_path / "m").tensors
    assert np.array_equal(found["f32"], plain) and np.array_equal(found["f16"], plain)
    assert np.array_equal(found["q4_0"], [(low_then_high - 8) * 0.5])
    assert np.array_equal(found["q4_1"], [low_then_high * 0.5 - 2.0])
    assert np.array_equal(found["q8_0"], signed * np.float32(0.5))
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    whole = gguf({"a": "b"}, [("w", (1, 32), 8, bytes(34))])
    files = {
        "no GGUF": b"PK" + bytes(100),
        "version 9": whole.replace(struct.pack("<I", 3), struct.pack("<I", 9), 1),
        "ggml type 14": gguf({}, [("w", (1, 256), 14, bytes(210))]),
        "no whole blocks": gguf({}, [("w", (1, 33), 8, bytes(34))]),
    }
    for message, data in files.items():
        (tmp_path / "m").write_bytes(data)
        with pytest.raises(GgufError, match=message):
            read_gguf(tmp_path / "m")


@pytest.mark.parametrize("kept", [25, 40, 60, -1])
def test_a_file_that_was_cut_off_is_damaged_wherever_it_ends(kept: int, tmp_path: Path) -> None:
    whole = gguf({"a": "b"}, [("w", (1, 64), 8, bytes(68))]).rstrip(b"\0") + bytes(34)
    (tmp_path / "m").write_bytes(whole[:kept])
    with pytest.raises(GgufError, match="damaged"):
        read_gguf(tmp_path / "m")
