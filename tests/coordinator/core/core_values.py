"""Short ways to build the values that tests of the coordinator's core need, and one canonical text for its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

from tinker.protocol.to_coordinator import (
    AgentSpec,
    Arrivals,
    Arrive,
    Generated,
    Hello,
    OpenTurn,
    RunSpec,
    SeatRequest,
    WorkerOffer,
)
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Edge,
    EpisodeId,
    Finish,
    ModelCard,
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
    pack_floats,
    pack_ids,
)

RUN = RunId("run")
START, END = Edge.START, Edge.END
ROLLOUT, UPDATE, EVALUATE = Phase.ROLLOUT, Phase.UPDATE, Phase.EVALUATE
KINDS = {"r": PoolKind.ROLLOUT, "f": PoolKind.FORWARD, "u": PoolKind.UPDATE}


def agent(name: str, every: int = 1, max_lag: int = 0) -> AgentSpec:
    return AgentSpec(AgentName(name), PolicyName(f"policy of {name}"), every, max_lag)


def run_spec(*agents: AgentSpec, run: str = RUN, **changes: object) -> RunSpec:
    """One round of one group of two episodes, no evaluation, agents a and b, unless told otherwise."""
    values: dict[str, object] = {"rounds": 1, "groups": 1, "group_size": 2, "evaluations": 0, "evaluate_every": 0}
    return RunSpec(RunId(run), "test", agents or (agent("a"), agent("b")), **{**values, **changes})  # type: ignore[arg-type]


def version(of: str, number: int) -> PolicyVersion:
    return PolicyVersion(PolicyName(f"policy of {of}"), number)


def blob(digest: str) -> BlobRef:
    return BlobRef(f"blob {digest}", digest, 1, "here", "/nowhere", "")


def host_hello(name: str = "host") -> Hello:
    return Hello(Role.HOST, PeerName(name), "here", 1)


def server_hello(name: str = "server", kinds: str = "rruf", model: str = "m1") -> Hello:
    """A task server; `kinds` has one letter per worker: r(ollout), f(orward), u(pdate)."""
    workers = tuple(
        WorkerOffer(WorkerName(f"{name}/{kind}{k}"), KINDS[kind], "scripted", 8) for k, kind in enumerate(kinds)
    )
    card = ModelCard(f"model {model}", model, "tokenizer", 100, 64, (0,))
    return Hello(Role.TASKSERVER, PeerName(name), "here", 2, workers, card, f"data of {name}", b"tokenizer")


def arrival(
    who: str, round: int, phase: Phase, edge: Edge, number: int = 0, samples: int = 1, run: str = RUN
) -> Arrive:
    return Arrive(RunId(run), round, phase, edge, AgentName(who), number, samples)


def arrivals(
    who: Sequence[str], round: int, phase: Phase, edge: Edge, number: int = 0, samples: int = 1, run: str = RUN
) -> Arrivals:
    """Agents that come together, all with the same version and number of samples. A text names one agent with each letter."""
    count = len(who)
    return Arrivals(RunId(run), round, phase, edge, tuple(map(AgentName, who)), (number,) * count, (samples,) * count)


def request(seat: str, wanted: PolicyVersion) -> SeatRequest:
    return SeatRequest(SeatName(seat), wanted, pack_ids([1, 2, 3]), Sampling(4))


def turn(number: int, *requests: SeatRequest, index: int = 0, phase: Phase = ROLLOUT, round: int = 1) -> OpenTurn:
    return OpenTurn(TurnId(RUN, EpisodeId(round, phase, index), number), requests, 20.0)


def answer(asked: Generate, **changes: object) -> Generated:
    """What an honest worker answers; its single id says which turn it answers."""
    values: dict[str, object] = {
        "turn": asked.turn,
        "seat": asked.seat,
        "worker": asked.worker,
        "ids": pack_ids([asked.turn.number, len(asked.seat)]),
        "logprobs": pack_floats([-0.5, -0.25]),
        "finish": Finish.STOP,
        "version": asked.policy,
    }
    return Generated(**{**values, **changes})  # type: ignore[arg-type]


def canonical(value: object) -> str:
    """A text that is equal exactly for equal states: sets sorted, mappings in their own order."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{each.name}={canonical(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{canonical(key)}: {canonical(item)}" for key, item in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(canonical, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(canonical, value)) + ")"
    return repr(value)
