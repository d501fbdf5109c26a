"""The iterated prisoner's dilemma: one flag turns two defectors into two cooperators, by reward alone."""

from __future__ import annotations

from typing import Literal

from envs.dilemma import Dilemma
from envs.strategies import tit_for_tat
from scenarios.games import play
from scenarios.scenario import Evaluation, ForfeitScores, Scores, scenario
from scenarios.table import Table


@scenario(
    "alpha",
    "beta",
    version=1,
    forfeit=ForfeitScores(own=-1.0, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "rounds": 20,
        "groups": 8,
        "group_size": 8,
        "replies": ["cooperate", "defect"],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 2e-3, "max_tokens": 6},
    },
    evaluations=(Evaluation("held-out", episodes=64, measure="cooperation"),),
    headline="cooperation",
    baselines={"alpha": tit_for_tat, "beta": tit_for_tat},
)
async def dilemma(table: Table, *, payoff: Literal["own", "shared"] = "own", rounds: int = 4) -> Scores:
    """Mixed motives: cooperate or defect, at the same moment, four times; each is paid its own or both the shared payoff.

    With "own" (the default) learning should end in defection, which *lowers* the mean score: that is the dilemma. With "shared" it
    should end in cooperation. Prompts are the same in both. An illegal answer ends the episode: -1 for whoever gave it, 0 for the other.
    """
    game = await play(table, Dilemma.start(table.rng, rounds=rounds, payoff=payoff))
    table.measure("cooperation", game.cooperation)
    return game.scores()
