"""Who may ask a coordinator's daemon what, and what it answers: without keys, over real frames, with every message there is."""

from __future__ import annotations

import copy
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from typing import Any, NewType, get_args, get_origin, get_type_hints

import anyio
import pytest
from test_daemon import ANN, Site, site

from coordinator.app.access import ASKS
from coordinator.app.bounded import SNAPSHOT, status_of
from coordinator.app.snapshot import PeerStatus, Snapshot, StoppedStatus, snapshot
from coordinator.core.coordinator import Coordinator
from coordinator.core.roster import CALLS, OfAnybody
from tinker.protocol import ToAny, ToCoordinator, ToDaemon, ToWatcher
from tinker.protocol.to_any import Draining, Refused, Welcome
from tinker.protocol.to_coordinator import Hello, WorkerOffer
from tinker.protocol.to_daemon import Drain, Status, Watch
from tinker.protocol.values import ModelCard, PeerName, PoolKind, Role, WorkerName
from tinker.runtime.codec import decode
from tinker.runtime.transport import Connection

KINDS = get_args(ToCoordinator | ToDaemon)
CARD = ModelCard("model", "digest", "tokenizer", 100, 64, (0,))
MEMBERS = [role for role in Role if CALLS[role]]
EMPTY = snapshot(Coordinator(PeerName("hub")), 0.0)


async def asks(here: Site, message: Any, by: Connection | None = None) -> Any:
    connection = await here.says(message, by)
    return decode(await connection.receive(), ToAny | ToWatcher)


def least(kind: Any) -> Any:
    """The smallest value of this type."""
    if isinstance(kind, NewType):
        return least(kind.__supertype__)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
        made: Any = kind
        return made(**{name: least(hints[name]) for name in needed})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if get_origin(kind) in (None, tuple):
        return (get_origin(kind) or kind)()
    return least(get_args(kind)[0])  # a union


def hello(role: Role) -> Hello:
    workers = (WorkerOffer(WorkerName("w"), PoolKind.ROLLOUT, "scripted", 1),) if role == Role.TASKSERVER else ()
    return replace(ANN, role=role, workers=workers, model=CARD if workers else None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("role", MEMBERS)
async def test_a_member_says_and_asks_what_its_role_may(role: Role, kind: type) -> None:
    async with site() as here:
        member = await here.says(hello(role))
        assert isinstance(decode(await member.receive(), ToAny), Welcome)
        await here.says(least(kind), member)
        refused = [key for key in here.daemon.refusals if key[1] == "not allowed"]
        if kind not in CALLS[role] | ASKS[role]:
            answer = decode(await member.receive(), ToAny)
            assert isinstance(answer, Refused) and answer.what == kind.__name__
            assert f"ann is a {role} and may not send this" in answer.reason
            assert refused == [(kind.__name__, "not allowed")]
        elif kind in ASKS[role]:
            assert refused == []


def test_everything_may_be_said_by_somebody_and_the_table_has_every_role() -> None:
    said = frozenset[type]().union(*CALLS.values(), *ASKS.values())
    assert said == frozenset(KINDS)
    assert set(CALLS) == set(ASKS) == set(Role)
    assert CALLS[Role.PLAYER] == frozenset(get_args(OfAnybody)) and not ASKS[Role.PLAYER]
    assert [role for role in Role if Drain in ASKS[role]] == [Role.OPERATOR]


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_who_only_asks_is_no_member(role: Role) -> None:
    async with site() as here:
        answer = await asks(here, hello(role))
        assert isinstance(answer, Refused) and f"{role} 'ann' is no member" in answer.reason
        assert here.members == set()


async def test_a_status_is_what_the_page_shows_and_changes_nothing() -> None:
    async with site() as here:
        await here.says(ANN)
        here.clock.advance(3.0)
        before = copy.deepcopy(here.daemon.core)
        for _ in range(20):
            answer = await asks(here, Watch())
        assert here.daemon.core == before
        assert answer == Status(SNAPSHOT.dump_json(here.daemon.look()))
        told = SNAPSHOT.validate_json(answer.snapshot)
        assert [(peer.name, peer.lease_age) for peer in told.peers] == [("ann", 3.0)]
        assert (told.uptime, told.left_out) == (3.0, 0)


async def test_drain_is_what_a_signal_does_and_may_be_said_twice() -> None:
    async with site() as here:
        host = await here.says(ANN)
        assert await asks(here, Drain()) == Draining("an operator has told the coordinator to stop")
        await anyio.wait_all_tasks_blocked()
        assert isinstance(decode(await host.receive(), ToAny), Welcome)
        assert decode(await host.receive(), ToAny) == Draining("the coordinator is stopping")
        assert await asks(here, Drain()) == Draining("the coordinator is stopping")
        told = await asks(here, Watch())
        assert SNAPSHOT.validate_json(told.snapshot).draining == "the coordinator is stopping"
        await here.passes(here.daemon.grace + 1.0)
        assert not here.daemon.serving


# --- its size ---


def peers(number: int) -> tuple[PeerStatus, ...]:
    return tuple(PeerStatus(f"ann-{each}", "host", "a machine", each, 1.0, "", ()) for each in range(number))


def shown(taken: Snapshot, limit: int) -> tuple[Snapshot, int]:
    answer = status_of(taken, limit)
    assert isinstance(answer, Status)
    return SNAPSHOT.validate_json(answer.snapshot), len(answer.snapshot)


def test_what_fits_is_whole() -> None:
    taken = replace(EMPTY, peers=peers(1500))
    size = len(SNAPSHOT.dump_json(taken))
    assert shown(taken, size) == (taken, size)


@pytest.mark.parametrize(("limit", "left"), [(200_000, 1000), (20_000, 100), (2_000, 10)])
def test_what_does_not_fit_has_the_beginning_of_its_lists_and_says_so(limit: int, left: int) -> None:
    taken = replace(EMPTY, peers=peers(1500), counts={f"count {number}": number for number in range(1500)})
    told, size = shown(taken, limit)
    assert size <= limit
    assert told.peers == taken.peers[:left]
    assert list(told.counts) == list(taken.counts)[:left]
    assert told.left_out == 2 * (1500 - left)


def test_what_does_not_fit_at_all_is_refused() -> None:
    taken = replace(EMPTY, stopped=(StoppedStatus("run", "guess", "ann", "because " * 1000),))
    assert status_of(taken, 1000) == Refused("Watch", "the status has more than 1000 bytes")
