"""Commits: whole or not there, each number once, the newest good one is found whatever happened to the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from tinker.pools.commits import Commits, CommitUnwritable, DiskCommits, MemoryCommits, Superseded
from tinker.protocol.values import PolicyName, RunId

ANN, BOB = PolicyName("run-1/ann"), PolicyName("run-1/bob")
Make = Callable[[Path], Commits]
both = pytest.mark.parametrize("make", [DiskCommits, lambda _: MemoryCommits()], ids=["disk", "memory"])


def files(number: int) -> dict[str, bytes]:
    return {"state": bytes([number]) * 1000, "empty": b"", "more": b"\n{}"}


def written(place: Path, count: int) -> DiskCommits:
    commits = DiskCommits(place)
    for number in range(1, count + 1):
        commits.write(ANN, number, files(number))
    return commits


@both
def test_the_newest_commit_is_read_back_as_it_was_written(make: Make, tmp_path: Path) -> None:
    commits = make(tmp_path / "state")
    assert (commits.newest(ANN), commits.read(ANN)) == (0, None)
    for number in (1, 2, 3):
        commits.write(ANN, number, files(number))
        found = commits.read(ANN)
        assert found is not None and (found.number, dict(found.files)) == (number, files(number))
    assert (commits.newest(BOB), commits.newest(ANN)) == (0, 3)


@both
@pytest.mark.parametrize("number", [1, 2, 4, 9])
def test_a_number_is_written_once_and_in_order(make: Make, tmp_path: Path, number: int) -> None:
    commits = make(tmp_path)
    commits.write(ANN, 1, files(1))
    commits.write(ANN, 2, files(2))
    with pytest.raises(Superseded, match=f"commit {number} of run-1/ann cannot be written, the newest is 2"):
        commits.write(ANN, number, files(9))
    found = commits.read(ANN)
    assert found is not None and dict(found.files) == files(2)


@both
def test_a_run_that_is_over_is_forgotten_and_no_other(make: Make, tmp_path: Path) -> None:
    commits = make(tmp_path)
    other = PolicyName("run-12/ann")
    for policy in (ANN, BOB, other):
        commits.write(policy, 1, files(1))
    commits.forget(RunId("run-1"))
    assert [commits.newest(policy) for policy in (ANN, BOB, other)] == [0, 0, 1]


def test_another_process_finds_them_and_only_the_last_two_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 5)
    again = DiskCommits(tmp_path)
    found = again.read(ANN)
    assert found is not None and found.number == 5
    assert sorted(path.name for path in (tmp_path / "run-1=ann").iterdir()) == ["000004.commit", "000005.commit"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "bytes of contents, expected"),
        (lambda data: data[:10], "does not begin as a commit does"),
        (lambda data: b"", "does not begin as a commit does"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its digest is"),
        (lambda data: data.replace(b"commit 1", b"commit 7", 1), "expected 'opentinker commit 1'"),
    ],
)
def test_a_damaged_commit_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    commits = written(tmp_path, 3)
    path = tmp_path / "run-1=ann" / "000003.commit"
    path.write_bytes(damage(path.read_bytes()))
    with structlog.testing.capture_logs() as logs:
        found = commits.read(ANN)
    assert found is not None and (found.number, dict(found.files)) == (2, files(2))
    assert [(line["event"], line["path"]) for line in logs] == [("commit refused", str(path))]
    assert why in logs[0]["why"]
    commits.write(ANN, 4, files(4))  # numbers go on after the damaged one
    assert (tmp_path / "run-1=ann" / "000003.commit").exists()


def test_what_was_cut_off_while_it_was_written_is_no_commit(tmp_path: Path) -> None:
    commits = written(tmp_path, 1)
    (tmp_path / "run-1=ann" / ".000002.77.part").write_bytes(b"half")
    assert commits.newest(ANN) == 1
    commits.write(ANN, 2, files(2))
    assert commits.newest(ANN) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CommitUnwritable, match=r"cannot commit to .*state: Permission denied"):
        DiskCommits(tmp_path / "state")


def test_a_full_disk_leaves_nothing_half_there(tmp_path: Path) -> None:
    import resource
    import signal

    commits = written(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(CommitUnwritable, match="000002"):
            commits.write(ANN, 2, files(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in (tmp_path / "run-1=ann").iterdir()] == ["000001.commit"]
    commits.write(ANN, 2, files(2))
