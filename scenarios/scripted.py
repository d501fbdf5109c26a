"""An episode in which scripted players sit on every seat: for tests, and to see what a scenario does before a model plays it."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from agents.players.player import Answer, Need
from agents.players.scripted import ScriptedPlayer
from scenarios.episode import Identity, Limits, play_episode
from scenarios.errors import Forfeited, ScenarioError
from scenarios.scenario import Scenario, ScriptedFunction
from tinker.protocol.episodes import Episode
from tinker.protocol.seeds import derive
from tinker.protocol.values import EpisodeId, Phase, SeatName


async def play_scripted(
    scenario: Scenario,
    *,
    seed: int = 0,
    scripts: Mapping[str, ScriptedFunction] | None = None,
    params: Mapping[str, object] | None = None,
    limits: Limits | None = None,
) -> Episode:
    """Play it once. `scripts` sit on the seats they are named for, the scenario's baselines on the others; `seed` is the table's.

    ScenarioError if a seat has neither.
    """
    chosen = {**scenario.baselines, **(scripts or {})}
    if missing := [seat for seat in scenario.seats if seat not in chosen]:
        raise ScenarioError(f"nobody sits on {', '.join(missing)}: give a script, or declare `baselines`")
    players = {
        SeatName(seat): ScriptedPlayer(chosen[seat], Random(derive(seed, "script", seat))) for seat in scenario.seats
    }
    return await play_episode(
        scenario,
        players,
        _Nobody(),
        identity=Identity("scripted", EpisodeId(0, Phase.ROLLOUT, 0)),
        rng_seed=seed,
        params=params or {},
        limits=limits or Limits(),
        clock=lambda: 0.0,
    )


class _Nobody:
    """`Turns` behind a table where everybody answers at once."""

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        raise AssertionError(f"scripted players need no generation, but {', '.join(needs)} asked for one")
