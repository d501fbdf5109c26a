"""Arrays on the way in and out: the core sees stubs, peers see what was sent, and nothing is kept longer than it may be needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.app.arrays import STUB, Arrays, Missing
from coordinator.core.tables import Admission, Table, Turn
from tinker.protocol.to_coordinator import Generated, Hello, OpenTurn, SeatRequest
from tinker.protocol.to_host import Admitted, SeatResult, TurnClosed
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import (
    EpisodeId,
    Finish,
    ModelCard,
    PackedFloats,
    PackedIds,
    PeerName,
    Phase,
    PolicyName,
    PolicyVersion,
    Role,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
    pack_floats,
    pack_ids,
)

V = PolicyVersion(PolicyName("p"), 1)
SEAT, WORKER = SeatName("ann"), WorkerName("w")
CARD = ModelCard("m", "m", "t", 9, 9, (0,))
PROMPT, IDS, LOGPROBS = pack_ids(range(300)), pack_ids([7, 8]), pack_floats([-1.0, -2.0])


def turn(number: int) -> TurnId:
    return TurnId(RunId("run"), EpisodeId(1, Phase.ROLLOUT, 0), number)


def opening(number: int, prompt: PackedIds = PROMPT) -> OpenTurn:
    return OpenTurn(turn(number), (SeatRequest(SEAT, V, prompt, Sampling(4)),), 20.0)


def answer(number: int, ids: PackedIds = IDS, logprobs: PackedFloats = LOGPROBS) -> Generated:
    return Generated(turn(number), SEAT, WORKER, ids, logprobs, Finish.STOP, V, 0.5, 2.0)


def closing(stripped: Generated) -> TurnClosed:
    result = SeatResult(SEAT, WORKER, stripped.ids, stripped.logprobs, Finish.STOP, V, 0.5, engine=2.0)
    return TurnClosed(stripped.turn, (result,))


def test_prompts_and_answers_come_out_as_they_went_in() -> None:
    arrays = Arrays()
    asked, said = arrays.strip(opening(0)), arrays.strip(answer(0))
    assert isinstance(asked, OpenTurn) and isinstance(said, Generated)
    (request,) = asked.requests
    assert [len(each) for each in (request.prompt, said.ids, said.logprobs)] == [STUB] * 3
    whole = arrays.fill(Generate(turn(0), SEAT, WORKER, V, request.prompt, Sampling(4), 20.0))
    assert isinstance(whole, Generate) and whole.prompt == PROMPT
    closed = arrays.fill(closing(said))
    assert isinstance(closed, TurnClosed)
    assert (closed.results[0].ids, closed.results[0].logprobs, closed.results[0].engine) == (IDS, LOGPROBS, 2.0)


def test_arrays_that_do_not_fit_together_still_do_not() -> None:
    for ids, logprobs in ((IDS, pack_floats([1.0])), (IDS, PackedFloats(b"")), (PackedIds(b""), LOGPROBS)):
        said = Arrays().strip(answer(0, ids, logprobs))
        assert isinstance(said, Generated) and len(said.ids) != len(said.logprobs)
    empty = Arrays().strip(answer(0, PackedIds(b""), PackedFloats(b"")))
    assert isinstance(empty, Generated) and (empty.ids, empty.logprobs) == (b"", b"")


def test_only_the_open_and_the_last_closed_turn_are_kept() -> None:
    arrays = Arrays()
    table = Table(RunId("run"), turn(0).episode)
    arrays.strip(opening(0))
    for number in range(5):
        said = arrays.strip(answer(number))
        assert isinstance(said, Generated)
        waiting = Turn(number + 1, 9.0, (Admission(opening(0).requests[0]),))
        arrays.strip(opening(number + 1))
        table = Table(table.run, table.episode, waiting, closing(said))
        arrays.settle(turn(number + 1), table)
    assert len(arrays) == 4
    arrays.sweep({(table.run, table.episode): table})
    assert len(arrays) == 4
    arrays.sweep({})
    assert len(arrays) == 0


def test_what_no_table_took_is_forgotten_at_once() -> None:
    arrays = Arrays()
    arrays.strip(opening(99))
    arrays.settle(turn(99), None)
    assert len(arrays) == 0


def test_a_lost_array_is_an_error_that_names_it() -> None:
    said = Arrays().strip(answer(3))
    assert isinstance(said, Generated)
    with pytest.raises(Missing, match="turn 3 of episode 1/rollout/0"):
        Arrays().fill(closing(said))


def test_a_tokenizer_outlives_the_process_if_there_is_a_directory(tmp_path: Path) -> None:
    hello = Hello(Role.TASKSERVER, PeerName("server"), "here", 1, (), CARD, "data", b"a tokenizer")
    stripped = Arrays(tmp_path).strip(hello)
    assert isinstance(stripped, Hello) and len(stripped.tokenizer) == STUB
    admitted = Admitted(RunId("run"), CARD, stripped.tokenizer, "data", "here")
    whole = Arrays(tmp_path).fill(admitted)
    assert isinstance(whole, Admitted) and whole.tokenizer == b"a tokenizer"
    with pytest.raises(Missing, match="it comes back with the task server that has it"):
        Arrays().fill(admitted)
