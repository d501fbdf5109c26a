"""Recordings as files, and as transcripts."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenario_fakes import ScriptedTurns, auction, lines, play, scripted, writers

from scenarios import RecordingError, read_recordings, render, replay, write_recordings
from tinker.protocol.episodes import Recording
from tinker.protocol.values import Finish, unpack_ids


async def record() -> Recording:
    left = ["hi", Finish.LENGTH, "[4]"]
    turns = ScriptedTurns({"ann": lambda context: left.pop(0), "bob": lambda context: "[\u00e9\U0001f600"})
    return (await play(auction, writers("ann", "bob"), turns, seed=2**62)).recording


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_recordings_come_back_as_they_were_written(tmp_path: Path) -> None:
    recordings = [await record(), await record()]
    write_recordings(tmp_path / "round-1.jsonl", recordings)
    assert read_recordings(tmp_path / "round-1.jsonl") == recordings
    assert names(tmp_path) == ["round-1.jsonl"]


async def test_a_recording_says_which_evaluation_it_belongs_to(tmp_path: Path) -> None:
    recording = (
        await play(auction, scripted(ann=lines("[1]"), bob=lines("[2]")), evaluation="held-out/greedy")
    ).recording
    assert recording.evaluation == "held-out/greedy"
    write_recordings(tmp_path / "r.jsonl", [recording])
    assert json.loads((tmp_path / "r.jsonl").read_text())["evaluation"] == "held-out/greedy"
    assert read_recordings(tmp_path / "r.jsonl") == [recording]
    assert render(recording).startswith("Episode 1/rollout/0 (held-out/greedy) of auction version 1")
    again = await replay(recording, auction)
    assert (again.evaluation, again.recording) == ("held-out/greedy", recording)


async def test_a_file_from_before_evaluations_were_recorded_can_be_read(tmp_path: Path) -> None:
    recording = await record()
    write_recordings(tmp_path / "r.jsonl", [recording])
    data = json.loads((tmp_path / "r.jsonl").read_text())
    del data["evaluation"]
    (tmp_path / "r.jsonl").write_text(json.dumps(data) + "\n")
    assert read_recordings(tmp_path / "r.jsonl") == [recording]


async def test_the_file_has_a_format_fields_in_order_and_ids_as_numbers(tmp_path: Path) -> None:
    recording = await record()
    write_recordings(tmp_path / "r.jsonl", [recording])
    data = json.loads((tmp_path / "r.jsonl").read_text())
    assert list(data)[:3] == ["format", "run", "episode"]
    assert data["format"] == 1
    replies = [line for line in data["lines"] if line["kind"] == "reply"]
    assert replies[0]["ids"] == [ord("h"), ord("i")]
    assert [unpack_ids(line.ids) for line in recording.lines] == [line["ids"] for line in data["lines"]]


async def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recording = await record()
    write_recordings(path, [recording])
    with pytest.raises(AttributeError):
        write_recordings(path, [recording, None])  # type: ignore[list-item]
    assert read_recordings(path) == [recording]
    assert names(tmp_path) == ["r.jsonl"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "line 1 is no recording"),
        ("[]", "line 1 is no recording"),
        ('{"format": 9}', "line 1 has format 9; this version reads format 1"),
        ('{"format": 1}', "line 1 is a damaged recording"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_its_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "r.jsonl").write_text(text + "\n")
    with pytest.raises(RecordingError, match=named):
        read_recordings(tmp_path / "r.jsonl")


@given(st.text())
def test_any_text_survives_the_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:

    async def talk() -> Recording:
        return (await play(auction, scripted(ann=lines(text), bob=lines(text)))).recording

    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    recording = anyio.run(talk)
    write_recordings(path, [recording])
    assert read_recordings(path) == [recording]


async def test_a_transcript_says_in_words_who_said_what_and_how_it_ended() -> None:
    text = render(await record())
    assert "Episode 1/rollout/0 of auction version 1" in text
    assert "  ann is briefed: You are a bidder." in text
    assert "Turn 2\n  ann is asked: Your sealed bid" in text
    assert "  ann says, but not as asked (cut off by the length limit): half a rep" in text
    assert "  bob forfeits: Write your bid" in text
    assert "It finished" in text
    assert "Scores: ann " in text
