"""A second-price auction among three, who may talk first: what is bid truly, and what is only said."""

from __future__ import annotations

from envs.auction import Auction
from envs.strategies import random_bidder, truthful_bidder
from scenarios.games import play
from scenarios.scenario import Evaluation, ForfeitScores, Scores, scenario
from scenarios.table import Table


@scenario(
    "ann",
    "bob",
    "cat",
    version=1,
    forfeit=ForfeitScores(own=-0.5, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "model": "table",
        "rounds": 40,
        "evaluate_every": 20,
        "groups": 8,
        "group_size": 8,
        "replies": ["low", "high", *(f"bid {bid}" for bid in range(10))],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 1e-3, "max_tokens": 6},
    },
    evaluations=(
        Evaluation("held-out", 64, "efficiency"),
        Evaluation("truthful", 64, "profit_ann", opponents={"bob": truthful_bidder, "cat": truthful_bidder}),
    ),
    headline="efficiency",
    baselines=dict.fromkeys(Auction.seats, random_bidder),
    private=Auction.seats,
)
async def auction(table: Table) -> Scores:
    """Mixed motives, three seats: private values, one public word each (low or high), then sealed bids; the second price is paid.

    The score is the winner's profit, 0 for the others. An illegal answer ends the episode: -0.5 for whoever gave it, 0 for the others.
    Measures: `efficiency` (the winner's value as a share of the highest), `profit_ann`, and `honest` (the share of true words).
    """
    for name in ("efficiency", "profit_ann"):
        table.measure(name, 0.0)
    game = await play(table, Auction.start(table.rng))
    scores = game.scores()
    table.measure("efficiency", game.efficiency)
    table.measure("profit_ann", scores["ann"])
    table.measure("honest", game.honesty)
    return scores
