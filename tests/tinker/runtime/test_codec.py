"""The codec: every message survives the trip, and nothing a peer sends raises anything but WireError."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker.protocol import VERSION, Message, ToAny, ToCoordinator, ToDaemon, ToHost, ToTaskserver, ToWatcher
from tinker.protocol.episodes import Episode, Trajectory
from tinker.protocol.operations import OptimStep, Publish
from tinker.protocol.to_bulk import ToBulkClient, ToBulkServer
from tinker.protocol.to_coordinator import Arrive, Generated, Heartbeat, Hello, OpenTurn, Operate, SeatRequest
from tinker.protocol.to_host import Missing, TurnClosed
from tinker.protocol.values import (
    AdamSpec,
    AgentName,
    Edge,
    EpisodeId,
    Finish,
    OpId,
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
from tinker.runtime.codec import MAX_ARRAY, MAX_FRAME, WireError, decode, encode

st.register_type_strategy(PackedIds, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(pack_ids))  # type: ignore[arg-type]
st.register_type_strategy(PackedFloats, st.lists(st.floats(width=32), max_size=5).map(pack_floats))  # type: ignore[arg-type]
st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(max_size=8))
st.register_type_strategy(bytes, st.binary(max_size=8))

TURN = TurnId(RunId("r"), EpisodeId(1, Phase.ROLLOUT, 3), 4)
OPEN = OpenTurn(
    TURN, (SeatRequest(SeatName("a"), PolicyVersion(PolicyName("p"), 1), pack_ids([1, 2]), Sampling(64)),), 30.0
)
ARRIVE = Arrive(RunId("r"), 1, Phase.UPDATE, Edge.START, AgentName("a"), 2)


EVERY = {*get_args(Message), *get_args(ToBulkServer), *get_args(ToBulkClient)}


def raw(*fields: Any, kind: str = "Heartbeat", version: Any = VERSION) -> bytes:
    return bytes(msgpack.packb([version, kind, *fields]))


@pytest.mark.parametrize("kind", sorted(EVERY, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_kind_round_trips(kind: type) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.from_type(kind))
    def check(message: Any) -> None:
        assert decode(encode(message), kind) == message

    check()


@settings(max_examples=20, deadline=None)
@given(st.from_type(Episode))
def test_an_episode_round_trips(episode: Episode) -> None:
    assert decode(encode(episode), Episode) == episode


def test_types_survive_the_trip() -> None:
    arrived = decode(encode(ARRIVE), ToCoordinator)
    assert type(arrived.phase) is Phase and type(arrived.edge) is Edge
    closed = decode(encode(Missing(RunId("r"), 1, Phase.ROLLOUT, Edge.END, ("a",), ())), ToHost)
    assert closed.arrived == ("a",) and closed.missing == ()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([ToAny, ToCoordinator, ToDaemon, ToHost, ToTaskserver, ToWatcher]))
def test_garbage_bytes_raise_only_wire_error(data: bytes, expected: Any) -> None:
    with pytest.raises(WireError):
        decode(data, expected)


_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
_trees = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(get_args(Message)), st.lists(_trees, max_size=6))
def test_garbage_fields_give_the_kind_or_a_wire_error(kind: type, fields: list[Any]) -> None:
    try:
        message = decode(raw(*fields, kind=kind.__name__), Message)
    except WireError:
        return
    assert (type(message) is kind and decode(encode(message), Message) == message) or "nan" in repr(message)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_message_raises_only_wire_error(data: st.DataObject) -> None:
    whole = bytearray(encode(OPEN))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(1, len(whole)))])
    with contextlib.suppress(WireError):
        decode(damaged, ToCoordinator)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (raw(version=2), "peer speaks version 2, we speak 1"),
        (raw(version=True), "peer speaks version True"),
        (raw(kind="Nonsense"), "unknown kind 'Nonsense'"),
        (raw(kind=7), "unknown kind 7"),  # type: ignore[arg-type]
        (raw("why", 1, kind="Bye"), "Bye.argument 1: Unexpected positional argument"),
        (raw(kind="Bye"), "Bye.reason: Missing required"),
        (raw(3, kind="Bye"), "Bye.reason: Input should be a valid string"),
        (
            raw("r", 1, "lunch", "start", "a", 0, kind="Arrive"),
            "Arrive.phase: Input should be 'rollout', 'update' or 'evaluate'",
        ),
        (raw("r", True, "update", "start", "a", 0, kind="Arrive"), "Arrive.round: Input should be a valid integer"),
        (raw("r", "o", "a", "p", ["Explode", 1], kind="Operate"), "Operate.operation"),
        (
            raw("r", "o", "a", "p", ["Publish", "1"], kind="Operate"),
            "Operate.operation.Publish.1: Input should be a valid integer",
        ),
        (msgpack.packb({"kind": "Bye"}), "not a message"),
        (msgpack.packb([VERSION, "Bye", {}]), "messages have no maps"),
        (msgpack.packb([VERSION]), "begins with version and kind"),
        (b"", "not a message"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, says: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(data, ToCoordinator)
    assert says in str(caught.value)


def test_packed_numbers_of_a_broken_length_are_refused() -> None:
    broken = Generated(
        TURN,
        SeatName("a"),
        WorkerName("w"),
        PackedIds(b"12345"),
        PackedFloats(b""),
        Finish.STOP,
        PolicyVersion(PolicyName("p"), 1),
    )
    with pytest.raises(WireError, match=r"Generated\.ids: packed numbers take 4 bytes each, got 5 bytes"):
        decode(encode(broken), ToCoordinator)


def test_a_kind_for_somebody_else_is_refused() -> None:
    with pytest.raises(WireError, match="unknown kind 'Heartbeat'"):
        decode(encode(Heartbeat()), ToHost)


def test_trailing_fields_with_defaults_may_be_missing() -> None:
    assert decode(raw("host", "h", "m", 7, kind="Hello"), ToCoordinator) == Hello(Role.HOST, PeerName("h"), "m", 7)


def test_union_members_are_tagged_by_their_class_name() -> None:
    operate = Operate(RunId("r"), OpId("o"), AgentName("a"), PolicyName("p"), Publish(3))
    assert msgpack.unpackb(encode(operate))[-1] == ["Publish", 3]
    step = Operate(RunId("r"), OpId("o"), AgentName("a"), PolicyName("p"), OptimStep(AdamSpec(0.1)))
    assert decode(encode(step), ToCoordinator) == step


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\x92\x01" + b"\xdd\x00\x0f\xff\xff" * 3000,  # arrays inside arrays, each announcing a million
        b"\x91" * 100_000,  # deep
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GB of text
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        bytes(MAX_FRAME + 1),
    ],
    ids=["array", "nested arrays", "depth", "bin", "str", "map", "frame"],
)
def test_bombs_are_refused_before_they_allocate(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data, ToCoordinator)


def test_an_array_above_the_limit_is_refused() -> None:
    with pytest.raises(WireError, match="exceeds max_array_len"):
        decode(raw(*[0] * (MAX_ARRAY + 1)), ToCoordinator)


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    @dataclass(frozen=True, slots=True)
    class Scored:
        reward: float
        count: int
        won: bool
        name: str
        scores: tuple[float, ...]

    sent = Scored(np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x"), np.array([1.0, 2.0]))  # type: ignore[arg-type]
    assert decode(encode(sent), Scored) == Scored(0.5, 3, True, "x", (1.0, 2.0))


def test_what_cannot_travel_is_named_at_the_sender() -> None:
    with pytest.raises(WireError, match=r"cannot send Arrive\.samples: TypeError: object cannot be sent"):
        encode(Arrive(RunId("r"), 1, Phase.UPDATE, Edge.START, AgentName("a"), 2, object()))  # type: ignore[arg-type]
    deep = OpenTurn(TurnId(RunId("r"), EpisodeId(2**70, Phase.ROLLOUT, 3), 4), (), 1.0)
    with pytest.raises(WireError, match=r"cannot send OpenTurn\.turn\.episode\.round: OverflowError"):
        encode(deep)
    with pytest.raises(WireError, match=r"cannot send Operate\.operation"):
        encode(Operate(RunId("r"), OpId("o"), AgentName("a"), PolicyName("p"), Heartbeat()))  # type: ignore[arg-type]
    with pytest.raises(WireError, match="cannot send int"):
        encode(3)


def test_a_message_above_the_frame_limit_is_refused_at_the_sender() -> None:
    with pytest.raises(WireError, match=r"cannot send Trajectory: .* bulk goes by the data plane"):
        encode(
            Trajectory(
                SeatName("a"),
                AgentName("a"),
                PolicyName("p"),
                PackedIds(bytes(MAX_FRAME)),
                b"",
                PackedFloats(b""),
                (),
                1.0,
                0,
                0,
                0,
            )
        )


def test_an_empty_turn_round_trips() -> None:
    assert decode(encode(TurnClosed(TURN, ())), ToHost) == TurnClosed(TURN, ())
