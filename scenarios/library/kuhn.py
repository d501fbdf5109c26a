"""Kuhn poker: hidden cards and bluffs, where the mean score says nothing and exploitability says everything."""

from __future__ import annotations

from envs.kuhn import Kuhn
from envs.strategies import equilibrium_kuhn, random_kuhn
from scenarios.games import play
from scenarios.scenario import Evaluation, ForfeitScores, Scores, ScriptedFunction, scenario
from scenarios.table import Table


def against(name: str, opponent: ScriptedFunction) -> tuple[Evaluation, ...]:
    """The same evaluation for each seat, with the opponent on the other."""
    return tuple(
        Evaluation(f"{name}-as-{seat}", 64, f"chips_{seat}", opponents={other: opponent})
        for seat, other in (("alpha", "beta"), ("beta", "alpha"))
    )


@scenario(
    "alpha",
    "beta",
    version=1,
    forfeit=ForfeitScores(own=-2.0, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "rounds": 40,
        "evaluate_every": 20,
        "groups": 12,
        "group_size": 8,
        "replies": ["check", "bet", "fold", "call"],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 1e-3, "entropy": 0.02, "max_tokens": 6},
    },
    evaluations=(*against("equilibrium", equilibrium_kuhn), *against("random", random_kuhn)),
    headline="showdown",
    private=("alpha", "beta"),
    baselines={"alpha": equilibrium_kuhn, "beta": equilibrium_kuhn},
)
async def kuhn(table: Table) -> Scores:
    """Zero-sum, hidden cards: one card of three each, one bet; whoever never bluffs, or always does, can be exploited.

    Scores are chips won. An illegal answer ends the episode: -2 for whoever gave it, as for a called bet that was lost, 0 for the
    other. All episodes of a group have the same deal. Measures: `chips_alpha`, `chips_beta`, and `showdown`, whether nobody folded.
    """
    for seat in Kuhn.seats:
        table.measure(f"chips_{seat}", -2.0)
    game = await play(table, Kuhn.start(table.rng))
    scores = game.scores()
    for seat in Kuhn.seats:
        table.measure(f"chips_{seat}", scores[seat])
    table.measure("showdown", float(game.said[-1] != "fold"))
    return scores
