"""The run directory: complete files, refusals that say what to do, and a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from coordinator.app.rundir import Exit, RunDirectory, RunDirectoryError, read_metrics

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond `size` bytes, as on a disk that fills up in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def created(path: Path) -> RunDirectory:
    return RunDirectory.create(path / "run", "guess", "seed = 1\n")


def everything(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if not each.is_dir()}


def test_the_default_place_is_named_after_scenario_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 3, 4, 5, 6, 7)
    first = RunDirectory.create(None, "games/guess.py:guess", "", now=now)
    second = RunDirectory.create(None, "games/guess.py:guess", "", now=now)
    assert first.path == Path("runs/guess-20260304-050607")
    assert second.path == Path("runs/guess-20260304-050607-2")


def test_the_configuration_is_there_from_the_start(tmp_path: Path) -> None:
    assert (created(tmp_path).path / "config.toml").read_text() == "seed = 1\n"


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    first = created(tmp_path)
    first.append([{"round": 1}])
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*--out"):
        created(tmp_path)
    assert read_metrics(first.path) == [{"round": 1}]


def test_a_directory_with_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert (created(tmp_path).path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirectoryError, match=r"run: .*; a file stands where a directory is needed"):
        created(tmp_path)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a place where nobody may write")
def test_an_unwritable_place_is_named_with_the_remedy() -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot use /proc/run.*--out"):
        RunDirectory.create(Path("/proc/run"), "guess", "")


def test_rows_begin_with_round_agent_and_reward(tmp_path: Path) -> None:
    run = created(tmp_path)
    run.append([{"kl": 0.1, "reward_std": 0.5, "agent": "ann", "round": 3, "reward_mean": 1.0}])
    assert run.metrics.read_text() == '{"round": 3, "agent": "ann", "reward_mean": 1.0, "reward_std": 0.5, "kl": 0.1}\n'


def test_what_json_cannot_say_becomes_null_and_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    run = created(tmp_path)
    odd = {"nan": math.nan, "inf": -math.inf, "f4": np.float32(0.5), "i8": np.int64(7), "deep": {"x": [math.nan]}}
    run.append([odd])
    assert read_metrics(run.path) == [{"nan": None, "inf": None, "f4": 0.5, "i8": 7, "deep": {"x": [None]}}]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = created(tmp_path)
    run.append([{"round": 1}, {"round": 2}])
    torn = run.metrics.read_bytes()[:-4]
    run.metrics.write_bytes(torn)
    assert read_metrics(run.metrics) == [{"round": 1}]


def test_another_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(RunDirectoryError, match="line 2 is damaged"):
        read_metrics(path)


def test_final_names_the_newest_version_and_survives_a_move(tmp_path: Path) -> None:
    run = created(tmp_path)
    run.save_adapter("ann", 2, {"weights": b"two"})
    run.save_adapter("ann", 12, {"weights": b"twelve"})
    run.save_adapter("ann", 3, {"weights": b"three"})
    moved = run.path.rename(tmp_path / "elsewhere")
    assert (moved / "adapters/ann/final/weights").read_bytes() == b"twelve"
    assert (moved / "adapters/ann/v000003/weights").read_bytes() == b"three"


def test_final_is_a_copy_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "symlink", no_links)
    run = created(tmp_path)
    for version in (1, 2):
        run.save_adapter("ann", version, {"weights": str(version).encode()})
    final = run.path / "adapters/ann/final"
    assert not final.is_symlink()
    assert (final / "weights").read_bytes() == b"2"
    assert sorted(each.name for each in final.parent.iterdir()) == ["final", "v000001", "v000002"]


def test_a_version_never_changes(tmp_path: Path) -> None:
    run = created(tmp_path)
    assert run.save_adapter("ann", 1, ADAPTER) == run.save_adapter("ann", 1, ADAPTER)
    with pytest.raises(RunDirectoryError, match="never changes"):
        run.save_adapter("ann", 1, {**ADAPTER, "adapter_config.json": b"other"})


@pytest.mark.parametrize("name", ["", "..", "a/b", "../../etc"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    run = created(tmp_path)
    with pytest.raises(RunDirectoryError, match="no plain file name"):
        run.save_adapter(name, 1, ADAPTER)
    with pytest.raises(RunDirectoryError, match="no plain file name"):
        run.save_adapter("ann", 1, {name: b""})
    with pytest.raises(RunDirectoryError, match="no plain file name"):
        run.write_text(name, "")
    assert everything(run.path) == {"config.toml", "metrics.jsonl"}


def test_recordings_are_numbered_by_phase_and_round(tmp_path: Path) -> None:
    path = created(tmp_path).recordings_path("rollout", 1)
    assert path == tmp_path / "run/recordings/rollout-0001.jsonl"
    assert path.parent.is_dir()


def test_the_exit_is_written_at_the_end(tmp_path: Path) -> None:
    run = created(tmp_path)
    assert not (run.path / "exit.json").exists()
    run.finish(Exit("finished", 0, "60 rounds"))
    assert json.loads((run.path / "exit.json").read_text()) == {"reason": "finished", "code": 0, "detail": "60 rounds"}


def test_a_disk_that_fills_up_takes_back_the_rows_it_could_not_hold(tmp_path: Path) -> None:
    run = created(tmp_path)
    run.append([{"round": 1}])
    with largest_file(4096), pytest.raises(RunDirectoryError, match=r"metrics\.jsonl.*is kept"):
        run.append([{"round": 2}, {"round": 2, "text": "x" * 9000}])
    assert run.metrics.read_text() == '{"round": 1}\n'
    run.append([{"round": 2}])
    assert read_metrics(run.path) == [{"round": 1}, {"round": 2}]


def test_a_disk_that_fills_up_leaves_no_half_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    run = created(tmp_path)
    run.write_text("summary.md", "old")
    run.save_adapter("ann", 1, ADAPTER)
    before = everything(run.path)
    with largest_file(4096):
        with pytest.raises(RunDirectoryError, match=r"summary\.md"):
            run.write_text("summary.md", "x" * 9000)
        with pytest.raises(RunDirectoryError, match="v000002"):
            run.save_adapter("ann", 2, {"adapter_config.json": b"{}", "weights": b"x" * 9000})
    assert everything(run.path) == before
    assert (run.path / "summary.md").read_text() == "old"
    assert (run.path / "adapters/ann/final").resolve().name == "v000001"


def test_a_directory_that_could_not_be_begun_can_be_used_later(tmp_path: Path) -> None:
    with largest_file(4096), pytest.raises(RunDirectoryError, match=r"config\.toml"):
        RunDirectory.create(tmp_path / "run", "guess", "#" * 9000)
    assert everything(created(tmp_path).path) == {"config.toml", "metrics.jsonl"}


def test_a_sync_without_space_says_to_free_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = created(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match=r"exit\.json: No space left on device; free some space"):
        run.finish(Exit("finished", 0))
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl: No space left on device"):
        run.append([{"round": 1}])
    assert everything(run.path) == {"config.toml", "metrics.jsonl"}
    assert read_metrics(run.path) == []
