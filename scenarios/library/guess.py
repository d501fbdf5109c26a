"""Guess a number: two agents that share one reward must learn a common language of two words, and to search with it."""

from __future__ import annotations

from envs.guess import Guess
from envs.strategies import binary_search, honest_hinter
from scenarios.games import play
from scenarios.scenario import Evaluation, ForfeitScores, Scores, scenario
from scenarios.table import Table


@scenario(
    "hinter",
    "guesser",
    version=1,
    forfeit=ForfeitScores(own=-1.0, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "rounds": 60,
        "evaluate_every": 20,
        "groups": 8,
        "group_size": 8,
        "replies": ["guess 1", "guess 2", "guess 3", "guess 4", "guess 5", "guess 6", "guess 7", "higher", "lower"],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 2e-3, "max_tokens": 6},
    },
    evaluations=(
        Evaluation("held-out", episodes=64, measure="success"),
        Evaluation("perfect-hinter", episodes=32, measure="success", opponents={"hinter": honest_hinter}),
        Evaluation("perfect-guesser", episodes=32, measure="success", opponents={"guesser": binary_search}),
    ),
    headline="success",
    private=("hinter",),
    baselines={"hinter": honest_hinter, "guesser": binary_search},
)
async def guess(table: Table, *, secret_max: int = 7, tries: int = 3) -> Scores:
    """Cooperative: the hinter knows a number, the guesser has three tries, both earn 1 if it is found.

    An illegal answer ends the episode: -1 for whoever gave it, 0 for the other. The guesser is told all hints so far at every try.
    """
    table.measure("success", 0.0)
    game = await play(table, Guess.start(table.rng, secret_max=secret_max, tries=tries))
    table.measure("success", float(game.found))
    return game.scores()
