"""Tensors over the wire are those of the file, to the bit, and torch reads them as its own."""

from __future__ import annotations

import io
import pickle

import pytest

from tinker.engines.sglang.wire import RawTensor, in_buckets, pickled, read_safetensors

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_torch_reads_what_was_written_without_it(kind: torch.dtype) -> None:
    tensors = {
        "wide": torch.arange(24).reshape(2, 3, 4).to(kind),
        "one": torch.tensor(3).to(kind),
        "none": torch.zeros(0, 4).to(kind),
    }
    raw = dict(read_safetensors(io.BytesIO(safetensors_torch.save(tensors, metadata={"format": "pt"}))))
    read = pickle.loads(pickled(raw))  # noqa: S301 (our own)
    assert list(read) == list(raw)
    for name, tensor in tensors.items():
        assert read[name].dtype == kind and torch.equal(read[name], tensor)


def test_a_list_keeps_its_order() -> None:
    raw = [("b", RawTensor("F32", (1,), b"\0\0\x80?")), ("a", RawTensor("F32", (1,), b"\0\0\0@"))]
    assert [(name, tensor.item()) for name, tensor in pickle.loads(pickled(raw))] == [("b", 1.0), ("a", 2.0)]  # noqa: S301


def test_it_names_nothing_but_what_rebuilds_a_tensor() -> None:
    """SGLang's unpickler knows these names and few others."""
    import pickletools

    stream = pickled({"x": RawTensor("BF16", (2,), b"abcd")})
    names = {arg for op, arg, _ in pickletools.genops(stream) if op.name == "GLOBAL"}
    assert names <= {"torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes", "collections OrderedDict"}


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_a_file_that_ends_too_early_is_refused(cut: int) -> None:
    whole = safetensors_torch.save({"x": torch.ones(8)})
    with pytest.raises(ValueError):
        list(read_safetensors(io.BytesIO(whole[:cut])))


def test_buckets_hold_everything_once_and_no_more_than_their_size() -> None:
    tensors = [(str(n), RawTensor("U8", (size,), bytes(size))) for n, size in enumerate([5, 5, 5, 30, 1, 9])]
    buckets = list(in_buckets(tensors, 10))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in tensors]
    assert [sum(len(tensor.data) for _, tensor in bucket) for bucket in buckets] == [10, 5, 30, 10]
