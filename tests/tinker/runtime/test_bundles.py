"""Bundles on disk: whole or not there, and known by their digest."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tinker.runtime.bulk import BulkError, BundleCorrupt, BundleExists, BundleStore, StoreUnwritable, machine_id
from tinker.runtime.bundles import digest_of

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 100, "empty": b""}


def test_what_was_put_is_read(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "store", "tcp://there:1")
    ref = store.put("ann@1", FILES)
    assert (ref.name, ref.size, ref.endpoint, ref.machine) == ("ann@1", 25602, "tcp://there:1", machine_id())
    assert store.read(ref) == FILES
    assert sorted(path.name for path in Path(ref.path).iterdir()) == sorted(FILES)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["ann@1"]


def test_the_digest_covers_names_and_contents() -> None:
    assert digest_of({"a": b"1", "b": b"2"}) == digest_of({"b": b"2", "a": b"1"})
    different = [{"a": b"1"}, {"b": b"1"}, {"a": b"2"}, {"a": b"1", "b": b""}, {"a": b"", "b": b"1"}, {}]
    assert len({digest_of(files) for files in different}) == len(different)


def test_the_same_bundle_may_be_put_again_but_no_other_of_its_name(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    ref = store.put("ann@1", FILES)
    assert store.put("ann@1", dict(FILES)) == ref
    with pytest.raises(BundleExists, match=r"holds another bundle .* choose a new name"):
        store.put("ann@1", {**FILES, "empty": b"x"})
    assert store.read(ref) == FILES


def test_two_writers_of_the_same_bundle_both_succeed(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    slow = store.incoming("ann@1", digest_of({"a": b"1"}), 1)
    slow.begin("a", 1)
    slow.add(b"1")
    first = store.put("ann@1", {"a": b"1"})
    assert slow.commit() == first
    slow.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["ann@1"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/nonexistent", ".hidden", "a\0b", "-x", "a\n", "x" * 201]
)
def test_no_name_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    store = BundleStore(tmp_path)
    for act in (
        lambda: store.put(name, {"a": b""}),
        lambda: store.put("a", {name: b""}),
        lambda: store.remove(name),
        lambda: store.listing(name),
    ):
        with pytest.raises(BulkError, match="cannot name a bundle or a file"):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "longer", "missing", "extra", "link"])
def test_a_damaged_bundle_is_refused(tmp_path: Path, damage: str) -> None:
    store = BundleStore(tmp_path)
    ref = store.put("ann@1", FILES)
    file = Path(ref.path) / "adapter_config.json"
    match damage:
        case "flip":
            file.write_bytes(b"{!")
        case "longer":
            file.write_bytes(b"{}}")
        case "missing":
            file.unlink()
        case "extra":
            (Path(ref.path) / "more").write_bytes(b"")
        case "link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleCorrupt):
        store.read(ref)


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    ref = store.put("ann@1", FILES)
    store.remove("ann@1")
    store.remove("ann@1")
    with pytest.raises(BulkError, match="cannot read bundle ann@1"):
        store.read(ref)
    with pytest.raises(BulkError, match="there is no bundle ann@1"):
        store.listing("ann@1")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreUnwritable, match=f"cannot write bundle big to {tmp_path}: File too large"):
            store.put("big", {"a": bytes(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_larger_than_the_disk_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreUnwritable, match=f"no room for bundle huge in {tmp_path}: .* bytes needed"):
        BundleStore(tmp_path).incoming("huge", "", 1 << 60)


def test_a_store_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnwritable, match="cannot make the bundle store"):
        BundleStore(tmp_path / "file" / "store")


def test_what_a_dead_process_left_half_written_is_removed_and_the_living_keep_theirs(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".incoming-{dead.pid}-x").mkdir()
    (tmp_path / f".incoming-{os.getpid()}-x").mkdir()
    BundleStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f".incoming-{os.getpid()}-x"]


def test_a_ref_of_another_place_is_still_read_from_this_store(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    ref = store.put("ann@1", FILES)
    assert store.read(replace(ref, path="/elsewhere", machine="other")) == FILES
