"""The coordinator dies at any moment, messages are lost: the run ends as if nothing had happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from system_restart import restarting
from system_scenarios import moody, three_turns
from system_world import Ran

from coordinator.app.history import check
from tinker.runtime.journal import Journal, JournalError
from tinker.runtime.transport import Arrival, Disconnected, PeerKey

MEASURED = (
    "round",
    "agent",
    "phase",
    "version",
    "episodes",
    "reward_mean",
    "tokens",
    "tokens_trained",
    "grad_norm",
    "failed",
    "forfeits",
)
RUN: dict[str, Any] = {"rounds": 2, "groups": 1, "group_size": 3, "params": {"share": 0.0}}
INPUTS = 56  # of the coordinator in the whole run, without faults
FEWEST = 40  # at least
GROUP = 14  # deaths tried at once


def facts(ran: Ran) -> dict[str, object]:
    """What may not depend on what went wrong."""
    recordings = ran.recordings()
    twice = [episode for episode, times in Counter(each.episode for each in recordings).items() if times > 1]
    assert twice == []
    return {
        "exit": (ran.exit.reason, ran.exit.code),
        "rows": [{key: row.get(key) for key in MEASURED} for row in ran.rows],
        "lines": [(each.episode, each.lines, each.scores) for each in recordings],
        "adapters": sorted(path.name for path in (ran.path / "adapters/ann").iterdir()),
        "weights": (ran.path / "adapters/ann/final/adapter_model.safetensors").read_bytes(),
    }


async def played(place: Path, *deaths: tuple[int, str]) -> tuple[dict[str, object], int, int]:
    """What a run leaves, how often the coordinator lived, and how many inputs its first life had."""
    await anyio.Path(place).mkdir()
    async with restarting(place, *deaths) as here:
        await here.world.serve("123")
        ran = await here.world.run(moody, **RUN)
    assert ran.exit.code == 0, ran.exit
    check(here.journal)
    return facts(ran), len(here.lives), here.lives[0].inputs


@pytest.mark.parametrize("when", ["input", "write"])
@pytest.mark.parametrize("first", range(1, INPUTS, GROUP))
async def test_a_coordinator_killed_after_any_input_goes_on_in_the_same_round(
    tmp_path: Path, first: int, when: str
) -> None:
    """Case 21: before the journal is written, and after it, before anything is sent."""
    found: dict[int, tuple[dict[str, object], int]] = {}

    async def killed(at: int) -> None:
        left, lives, _ = await played(tmp_path / f"killed-{at}", *([(at, when)] if at else []))
        found[at] = left, lives

    async with anyio.create_task_group() as tasks:
        for at in (0, *range(first, first + GROUP)):
            tasks.start_soon(killed, at)
    expected, _ = found.pop(0)
    assert expected["adapters"] == ["final", "v000000", "v000001", "v000002"]
    assert {at: left for at, (left, _) in found.items() if left != expected} == {}
    assert [at for at, (_, lives) in found.items() if lives != 2 and at <= FEWEST] == []


async def test_a_coordinator_may_die_again_and_again(tmp_path: Path) -> None:
    expected, _, _ = await played(tmp_path / "undisturbed")
    found, lives, _ = await played(tmp_path / "killed", *((at, "write") for at in (3, 5, 8, 2, 1, 9, 12, 6)))
    assert (found, lives) == (expected, 9)


class Leaky:
    """A listener that loses one frame in so many, in either direction."""

    def __init__(self, listener: Any, one_in: int) -> None:
        self._listener, self._one_in = listener, one_in
        self._rng = random.Random(one_in)
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def _loses(self) -> bool:
        lost = self._rng.randrange(self._one_in) == 0
        self.lost += lost
        return lost

    async def receive_many(self) -> list[Arrival]:
        return [
            each for each in await self._listener.receive_many() if isinstance(each, Disconnected) or not self._loses()
        ]

    def send(self, peer: PeerKey, data: bytes) -> None:
        if not self._loses():
            self._listener.send(peer, data)

    def send_many(self, peer: PeerKey, frames: Sequence[bytes]) -> int:
        kept = [data for data in frames if not self._loses()]
        return len(frames) - len(kept) + self._listener.send_many(peer, kept)


@pytest.mark.parametrize("one_in", [3, 5, 10])
async def test_lost_messages_heal(tmp_path: Path, one_in: int) -> None:
    """Cases 1 to 3, with every kind of message: each is asked again until its answer comes."""
    expected, _, _ = await played(tmp_path / "undisturbed")
    leaky: list[Leaky] = []

    def wrap(listener: Any) -> Leaky:
        leaky.append(Leaky(listener, one_in))
        return leaky[0]

    async with restarting(tmp_path / "leaky", wrap=wrap) as here:
        await here.world.serve("123")
        ran = await here.world.run(moody, **RUN)
    assert leaky[0].lost > 10
    assert facts(ran) == expected


async def test_several_agents_and_open_turns_survive_it_too(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 2, "groups": 2, "group_size": 4, "update_order": "in_turn"}
    left = []
    for number, deaths in enumerate([(), ((40, "input"), (60, "write"), (50, "input"))]):
        await anyio.Path(tmp_path / str(number)).mkdir()
        async with restarting(tmp_path / str(number), *deaths) as here:
            await here.world.serve("123")
            left.append(facts(await here.world.run(three_turns, **given)))
        check(here.journal)
    assert left[0] == left[1]


async def test_a_coordinator_that_has_lost_its_journal_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    async with restarting(tmp_path, (30, "write")) as here:
        here.forgets = True
        await here.world.serve("123")
        ran = await here.world.run(moody, **RUN)
    assert (ran.exit.reason, ran.exit.code) == ("coordinator lost", 3)
    assert "the coordinator restarted and refused" in ran.exit.detail


async def test_while_the_journal_cannot_be_written_everybody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 23: the disk is full for a while in the middle of the run."""
    expected, _, _ = await played(tmp_path / "undisturbed")
    real, appends = Journal.append, iter(range(10**6))

    def full_for_a_while(self: Journal, records: Sequence[bytes], *, durable: bool) -> None:
        if 30 <= next(appends) < 40:
            raise JournalError("cannot write it: No space left on device")
        real(self, records, durable=durable)

    monkeypatch.setattr(Journal, "append", full_for_a_while)
    found, lives, _ = await played(tmp_path / "full")
    assert (found, lives) == (expected, 1)
    assert next(appends) > 40
