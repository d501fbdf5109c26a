"""A negotiation over a price: private worth and cost, offers in turn, and the right to walk away."""

from __future__ import annotations

from envs.negotiate import Negotiate
from envs.strategies import fair_negotiator, random_negotiator
from scenarios.games import play
from scenarios.scenario import Evaluation, ForfeitScores, Scores, scenario
from scenarios.table import Table


@scenario(
    "buyer",
    "seller",
    version=1,
    forfeit=ForfeitScores(own=-0.5, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "model": "table",
        "rounds": 40,
        "evaluate_every": 20,
        "groups": 8,
        "group_size": 8,
        "replies": ["accept", "walk", *(f"offer {price}" for price in range(1, 10))],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 1e-3, "max_tokens": 6},
    },
    evaluations=(
        Evaluation("held-out", 64, "gain"),
        Evaluation("fair-as-buyer", 64, "profit_buyer", opponents={"seller": fair_negotiator}),
        Evaluation("fair-as-seller", 64, "profit_seller", opponents={"buyer": fair_negotiator}),
    ),
    headline="gain",
    baselines=dict.fromkeys(Negotiate.seats, random_negotiator),
    private=Negotiate.seats,
)
async def negotiate(table: Table, *, moves: int = 4) -> Scores:
    """Mixed motives, private values: offers in turn until one accepts or walks away; no deal, no gain.

    An illegal answer ends the episode: -0.5 for whoever gave it, 0 for the other. Measures: `gain` (what both together gained, as a
    share of the most that any deal could give; a deal at a loss counts below 0), `profit_buyer`, `profit_seller`.
    """
    game = Negotiate.start(table.rng, moves=moves)
    for name in ("gain", "profit_buyer", "profit_seller"):
        table.measure(name, 0.0)
    game = await play(table, game)
    scores = game.scores()
    table.measure("gain", sum(scores.values()) * 9 / max(1, game.possible))
    for seat, profit in scores.items():
        table.measure(f"profit_{seat}", profit)
    return scores
