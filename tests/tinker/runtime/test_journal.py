"""The journal on disk: what was appended comes back, whatever interrupted the last write, and nothing else is accepted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tinker.runtime.journal import (
    Journal,
    JournalDamaged,
    JournalError,
    JournalInUse,
    prune,
    read_journal,
    read_segment,
    segment_paths,
)

RECORDS = [b"first", b"", b"a third record that is a little longer"]


def filled(directory: Path, records: list[bytes] = RECORDS) -> Path:
    """A journal with one segment; returns its file."""
    journal = Journal(directory, rules=1)
    path = journal.begin(b"snapshot", epoch=1)
    journal.append(records, durable=False)
    journal.close()
    return path


def reopened(directory: Path) -> tuple[list[bytes], str]:
    """What a new process finds, and what it had to repair."""
    journal = Journal(directory, rules=1)
    journal.close()
    assert journal.newest is not None
    return [record for _, record in journal.newest.records], journal.repaired


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    path = filled(tmp_path)
    assert reopened(tmp_path) == (RECORDS, "")
    segment = read_segment(path, last=True)
    assert (segment.snapshot, segment.epoch, segment.number, segment.rules) == (b"snapshot", 1, 1, 1)


def test_a_file_cut_at_any_byte_of_its_last_record_loses_that_record_only(tmp_path: Path) -> None:
    whole = filled(tmp_path).read_bytes()
    path = segment_paths(tmp_path)[0]
    last = len(RECORDS[-1]) + 12
    for kept in range(len(whole) - last + 1, len(whole)):
        path.write_bytes(whole[:kept])
        records, repaired = reopened(tmp_path)
        assert records == RECORDS[:-1]
        assert str(path) in repaired and "cut off" in repaired
        assert reopened(tmp_path) == (RECORDS[:-1], "")  # it is repaired for good


def test_a_last_record_with_wrong_bytes_is_cut_off(tmp_path: Path) -> None:
    path = filled(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert reopened(tmp_path)[0] == RECORDS[:-1]


def test_a_tail_of_zeros_is_cut_off(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(100))
    assert reopened(tmp_path)[0] == RECORDS


def test_a_changed_byte_anywhere_else_is_an_error_with_file_and_offset(tmp_path: Path) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole) - len(RECORDS[-1]) - 12):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with pytest.raises(JournalDamaged, match=rf"{path} is damaged at offset \d+"):
            reopened(tmp_path)


def test_only_the_newest_segment_may_have_a_torn_tail(tmp_path: Path) -> None:
    path = filled(tmp_path)
    journal = Journal(tmp_path, rules=1)
    journal.begin(b"later", epoch=2)
    journal.close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalDamaged, match="00000001"):
        list(read_journal(tmp_path))


def test_segments_follow_each_other_until_they_are_pruned(tmp_path: Path) -> None:
    journal = Journal(tmp_path, rules=1)
    for number in range(4):
        journal.begin(b"state %d" % number, epoch=7)
        journal.append([b"record %d" % number], durable=True)
    assert [segment.snapshot for segment in read_journal(tmp_path)] == [b"state 0", b"state 1", b"state 2", b"state 3"]
    assert [path.name for path in prune(tmp_path, keep=2)] == ["00000001.journal", "00000002.journal"]
    journal.close()
    assert [segment.number for segment in read_journal(tmp_path)] == [3, 4]
    assert reopened(tmp_path) == ([b"record 3"], "")


def test_the_epoch_of_a_segment_is_known_to_whoever_opens_it_next(tmp_path: Path) -> None:
    filled(tmp_path)
    journal = Journal(tmp_path, rules=1)
    assert journal.epoch == 1
    journal.begin(b"again", epoch=2)
    journal.close()
    later = Journal(tmp_path, rules=1)
    later.close()
    assert later.epoch == 2


def test_two_processes_never_share_a_directory(tmp_path: Path) -> None:
    first = Journal(tmp_path, rules=1)
    with pytest.raises(JournalInUse, match=f"another coordinator has the journal {tmp_path} open"):
        Journal(tmp_path, rules=1)
    first.close()
    Journal(tmp_path, rules=1).close()


def test_a_full_disk_takes_the_append_back_and_the_next_one_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, rules=1)
    path = journal.begin(b"snapshot", epoch=1)
    journal.append([b"before"], durable=False)
    real = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) <= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[:8])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JournalError, match=f"cannot write {path}: No space left on device; make room"):
        journal.append([b"lost", b"lost too"], durable=False)
    with pytest.raises(JournalError, match="make room"):
        journal.begin(b"another", epoch=1)
    monkeypatch.setattr(os, "write", real)
    journal.append([b"after"], durable=False)
    journal.close()
    assert reopened(tmp_path) == ([b"before", b"after"], "")
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".part"] == []


def test_other_rules_and_other_formats_are_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(JournalError, match="written under rules 1, this version has rules 2"):
        Journal(tmp_path, rules=2)
    assert reopened(tmp_path)[0] == RECORDS  # and the lock was given back


def test_no_journal_is_an_error_that_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal in"):
        list(read_journal(tmp_path))
