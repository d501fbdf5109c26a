"""The coordinator's journal: folding it gives the same, and whatever does not is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.app import journal as journals
from coordinator.app.history import check, show
from coordinator.app.journal import Diverged, Entry, Recorder, open_journal, restore, snapshot
from coordinator.core.coordinator import RULES, Coordinator
from coordinator.core.roster import MemberRefused
from tinker.protocol.operations import Attach, Published
from tinker.protocol.to_coordinator import (
    AgentSpec,
    Arrive,
    Heartbeat,
    Hello,
    Loaded,
    OpenTurn,
    Operate,
    RunSpec,
    SeatRequest,
    Submit,
    WorkerDone,
    WorkerOffer,
)
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Edge,
    EpisodeId,
    LoraSpec,
    ModelCard,
    OpId,
    PeerName,
    Phase,
    PolicyName,
    PolicyVersion,
    PoolKind,
    Role,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
    pack_ids,
)
from tinker.runtime.codec import decode, encode
from tinker.runtime.journal import Journal, JournalDamaged, JournalError, prune, read_segment, segment_paths

HOST, SERVER, RUN = PeerName("host"), PeerName("server"), RunId("run")
R0, U0 = WorkerName("server/r"), WorkerName("server/u")
HELLO = Hello(Role.HOST, HOST, "here", 1)
OFFERS = (WorkerOffer(R0, PoolKind.ROLLOUT, "scripted", 8), WorkerOffer(U0, PoolKind.UPDATE, "scripted", 1))
SERVER_HELLO = Hello(Role.TASKSERVER, SERVER, "here", 2, OFFERS, ModelCard("m", "m", "t", 9, 9, (0,)), "data", b"")
SPEC = RunSpec(RUN, "test", (AgentSpec(AgentName("a"), PolicyName("p")),), 1, 1, 2, 0, 0)
V0 = PolicyVersion(PolicyName("p"), 0)
REQUEST = SeatRequest(SeatName("x"), V0, pack_ids([1, 2]), Sampling(4))
TURN = OpenTurn(TurnId(RUN, EpisodeId(1, Phase.ROLLOUT, 0), 0), (REQUEST,), 20.0)


def new() -> Coordinator:
    return Coordinator(PeerName("coordinator"))


def play(recorder: Recorder) -> None:
    """Until a turn is open."""
    recorder.join(SERVER_HELLO, 0.0)
    recorder.join(HELLO, 0.5)
    attach = Operate(RUN, OpId("op"), AgentName("a"), PolicyName("p"), Attach(LoraSpec()))
    published = Published(V0, BlobRef("b", "digest", 1, "here", "/nowhere", ""))
    steps: list[tuple[PeerName, Any]] = [
        (HOST, Submit(SPEC)),
        (HOST, attach),
        (SERVER, WorkerDone(RUN, OpId("op"), U0, published)),
        (SERVER, Loaded(RUN, R0, V0, "digest")),
        (HOST, Arrive(RUN, 1, Phase.ROLLOUT, Edge.START, AgentName("a"), 0)),
        (HOST, TURN),
        (HOST, Arrive(RUN, 7, Phase.ROLLOUT, Edge.START, AgentName("a"), 0)),  # refused
    ]
    for at, (peer, message) in enumerate(steps, start=1):
        recorder.step(peer, message, float(at))
    recorder.tick(27.0)  # the turn closes
    recorder.commit()


def opened(directory: Path, now: float = 0.0) -> Recorder:
    return open_journal(directory, new(), now)


def closed(recorder: Recorder) -> Recorder:
    assert recorder.journal is not None
    recorder.journal.close()
    return recorder


def rewrite(directory: Path, change: Callable[[Entry], Entry]) -> None:
    """The only segment again, with each entry changed."""
    segment = read_segment(segment_paths(directory)[0], last=True)
    segment.path.unlink()
    journal = Journal(directory, RULES)
    journal.begin(segment.snapshot, segment.epoch)
    journal.append([encode(change(decode(record, Entry))) for _, record in segment.records], durable=False)
    journal.close()


def test_folding_gives_the_same_state(tmp_path: Path) -> None:
    recorder = closed_after(play, opened(tmp_path))
    again = closed(opened(tmp_path, 70.0))
    assert again.core.epoch == 2
    recorder.core.restart(2, 70.0)
    assert snapshot(again.core) == snapshot(recorder.core)
    assert check(tmp_path).entries == 11  # ten inputs and the restart


def test_a_restart_in_the_middle_of_a_restart_uses_no_epoch_twice(tmp_path: Path) -> None:
    closed_after(play, opened(tmp_path))
    first = closed(opened(tmp_path))
    segment_paths(tmp_path)[-1].write_bytes(segment_paths(tmp_path)[-1].read_bytes()[:-1])  # its entry was not written
    assert (first.core.epoch, closed(opened(tmp_path)).core.epoch) == (2, 3)
    assert check(tmp_path).epoch == 3


def test_nothing_of_an_input_is_kept_before_it_is_committed(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.join(HELLO, 0.0)
    closed(recorder)
    assert check(tmp_path).entries == 0
    assert not closed(opened(tmp_path)).core.roster.away


def test_who_is_not_welcome_is_no_entry(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.join(HELLO, 0.0)
    with pytest.raises(MemberRefused):
        recorder.join(replace(HELLO, pid=2), 1.0)
    recorder.commit()
    closed(recorder)
    assert check(tmp_path).entries == 1


def test_a_burst_is_one_write_and_syncs_only_for_what_must_be_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = opened(tmp_path)
    writes: list[tuple[int, bool]] = []
    assert recorder.journal is not None
    real = recorder.journal.append

    def append(records: Sequence[bytes], *, durable: bool) -> None:
        writes.append((len(records), durable))
        real(records, durable=durable)

    monkeypatch.setattr(recorder.journal, "append", append)
    play(recorder)
    recorder.step(HOST, replace(TURN, turn=replace(TURN.turn, episode=EpisodeId(1, Phase.ROLLOUT, 1))), 28.0)
    recorder.step(HOST, Heartbeat(), 28.0)
    recorder.commit()
    recorder.commit()
    closed(recorder)
    assert writes == [(10, True), (2, False)]


def test_new_segments_begin_by_themselves_and_only_the_newest_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SEGMENT", 5)
    recorder = opened(tmp_path)
    play(recorder)
    for number in range(13):
        recorder.step(HOST, Heartbeat(), 28.0 + number)
        recorder.commit()
    closed(recorder)
    found = check(tmp_path)
    assert (found.segments, found.entries) == (4, 23)
    assert [path.name for path in prune(tmp_path)] == [f"0000000{number}.journal" for number in (1, 2, 3)]
    assert set(closed(opened(tmp_path)).core.runs) == {RUN}


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = opened(tmp_path)
    assert recorder.journal is not None
    real = recorder.journal.append
    monkeypatch.setattr(recorder.journal, "append", _full)
    with pytest.raises(JournalError, match="no room"):
        play(recorder)
    monkeypatch.setattr(recorder.journal, "append", real)
    recorder.step(HOST, Heartbeat(), 28.0)
    recorder.commit()
    closed(recorder)
    assert check(tmp_path).entries == 11


def test_check_names_the_first_entry_with_other_effects(tmp_path: Path) -> None:
    closed_after(play, opened(tmp_path))
    rewrite(tmp_path, lambda entry: replace(entry, effects=b"x" * 8) if entry.number in (6, 8) else entry)
    with pytest.raises(Diverged, match=r"00000001.journal, offset \d+: entry 6 \(step host\) has other effects"):
        check(tmp_path)
    with pytest.raises(Diverged, match="entry 6"):
        opened(tmp_path)


def test_check_names_a_snapshot_that_does_not_follow(tmp_path: Path) -> None:
    closed_after(play, opened(tmp_path))
    closed(opened(tmp_path))
    first = read_segment(segment_paths(tmp_path)[0], last=False)
    first.path.write_bytes(first.path.read_bytes()[: first.records[-1][0]])  # as if its last entry had never been
    with pytest.raises(Diverged, match=r"00000002.journal: the snapshot is another state"):
        check(tmp_path)


def test_a_missing_entry_is_damage(tmp_path: Path) -> None:
    closed_after(play, opened(tmp_path))
    rewrite(tmp_path, lambda entry: replace(entry, number=entry.number + (entry.number > 4)))
    with pytest.raises(JournalDamaged, match="entry 6, expected was 5"):
        check(tmp_path)


def test_show_has_a_line_for_whatever_did_something(tmp_path: Path) -> None:
    closed_after(play, opened(tmp_path))
    lines = list(show(tmp_path))
    assert lines[0] == "00000001  epoch 1, 0 runs, 10 entries"
    assert "step host Submit(spec=RunSpec(run=run" in lines[3]
    assert "host <- Admitted(run=run" in lines[3]
    assert any("Refused(what=Arrive" in line for line in lines)
    assert len(list(show(tmp_path, "run"))) == len(lines) - 2  # without the two who joined
    assert len(list(show(tmp_path, "another"))) == 1


def test_a_snapshot_is_the_whole_state(tmp_path: Path) -> None:
    recorder = closed_after(play, opened(tmp_path))
    core = new()
    restore(core, snapshot(recorder.core))
    assert snapshot(core) == snapshot(recorder.core)
    assert core.turns.counts is core.counts
    assert core.violations() == []


def closed_after(do: Callable[[Recorder], None], recorder: Recorder) -> Recorder:
    do(recorder)
    return closed(recorder)


def _full(records: Sequence[bytes], *, durable: bool) -> None:
    raise JournalError("no room")


def test_a_coordinator_may_be_started_again_with_another_lease(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    for lease in (15.0, 4.0):
        recorder = open_journal(directory, Coordinator(PeerName("coordinator"), lease=lease), 0.0)
        assert recorder.journal is not None
        recorder.journal.close()
        assert recorder.core.lease == lease
    assert check(directory)


def test_old_segments_go_and_what_a_restart_needs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "SEGMENT", 3)
    directory = tmp_path / "journal"
    recorder = open_journal(directory, new(), 0.0, segments=2)
    recorder.join(HELLO, 1.0)
    for at in range(2, 30):
        recorder.tick(float(at))
        recorder.commit()
        paths = segment_paths(directory)
        assert len(paths) <= 2 and read_segment(paths[-1], last=True).snapshot
    closed(recorder)
    again = open_journal(directory, new(), 40.0, segments=1)
    assert again.core.epoch == 2 and HOST in again.core.roster.away
    assert len(segment_paths(directory)) == 1
    closed(again)
    kept = open_journal(directory, new(), 50.0)
    assert len(segment_paths(directory)) == 2  # 0: all of them
    closed(kept)
    check(directory)
