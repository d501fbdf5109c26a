"""Nim: zero-sum self-play, where only play against fixed opponents shows whether anybody got better."""

from __future__ import annotations

from typing import Literal

from envs.nim import Nim
from envs.strategies import perfect_nim, random_nim
from scenarios.games import play
from scenarios.scenario import Evaluation, ForfeitScores, Scores, ScriptedFunction, scenario
from scenarios.table import Table


def against(name: str, opponent: ScriptedFunction, **params: object) -> tuple[Evaluation, ...]:
    """The same evaluation for each seat: it moves first, the opponent sits on the other."""
    return tuple(
        Evaluation(
            f"{name}-as-{seat}", 64, f"win_{seat}", opponents={other: opponent}, params={"first": seat, **params}
        )
        for seat, other in (("alpha", "beta"), ("beta", "alpha"))
    )


@scenario(
    "alpha",
    "beta",
    version=1,
    forfeit=ForfeitScores(own=-1.0, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "rounds": 40,
        "evaluate_every": 20,
        "groups": 8,
        "group_size": 8,
        "replies": ["take 1", "take 2", "take 3"],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 1e-3, "max_tokens": 6},
    },
    evaluations=(*against("perfect", perfect_nim, winnable=True), *against("random", random_nim)),
    headline="optimal",
    baselines={"alpha": perfect_nim, "beta": perfect_nim},
)
async def nim(
    table: Table,
    *,
    pile_min: int = 4,
    pile_max: int = 9,
    first: Literal["", "alpha", "beta"] = "",
    winnable: bool = False,
) -> Scores:
    """Zero-sum: take one to three sticks in turn; whoever takes the last one wins.

    An illegal answer ends the episode: -1 for whoever gave it, 0 for the other; nobody has won. The algorithm is grpo: all episodes
    of a group start from the same pile and mover, so the group's mean score is what that position is worth between the two.
    Measures: `win_alpha`, `win_beta`, and `optimal`, the share of moves from winnable piles that kept the win (where there was any).
    """
    seats = Nim.seats
    for seat in seats:
        table.measure(f"win_{seat}", 0.0)
    game = await play(table, Nim.start(table.rng, pile_min=pile_min, pile_max=pile_max, first=first, winnable=winnable))
    scores = game.scores()
    for seat in seats:
        table.measure(f"win_{seat}", float(scores[seat] > 0))
    good, possible = game.optimal_moves()
    if possible:
        table.measure("optimal", good / possible)
    return scores
