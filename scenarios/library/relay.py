"""A word handed from seat to seat: one seat may leave early, one comes late, and all are paid for what arrives."""

from __future__ import annotations

import random
from collections.abc import Sequence

from scenarios.scenario import ForfeitScores, Scores, scenario
from scenarios.table import Table

WORDS = 7
COST = 0.2
"""What passing the word on costs the second seat; leaving costs it nothing."""


def word(reply: str) -> int:
    """The number in `say 3`."""
    match reply.strip().lower().removesuffix(".").split():
        case ["say", number] if number in map(str, range(1, WORDS + 1)):
            return int(number)
    raise ValueError(f"not a legal answer. say say and a number from 1 to {WORDS}.")


def word_or_leave(reply: str) -> int | None:
    """As `word`, or None for whoever leaves."""
    return None if reply.strip().lower().removesuffix(".") == "leave" else word(reply)


def faithful(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Says what it was told."""
    return next(f"say {each}" for each in prompt.replace(".", " ").split() if each.isdecimal())


def careless(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Says anything."""
    return f"say {rng.randint(1, WORDS)}"


@scenario(
    "north",
    "east",
    "south",
    "west",
    version=1,
    forfeit=ForfeitScores(own=-0.5, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "model": "table",
        "rounds": 40,
        "groups": 8,
        "group_size": 8,
        "replies": ["leave", *(f"say {number}" for number in range(1, WORDS + 1))],
        "learning": {"algorithm": "grpo", "scale": "batch", "lr": 2e-3, "max_tokens": 6},
    },
    headline="arrived",
    baselines={"north": careless, "east": careless, "south": careless, "west": careless},
    private=("north",),
)
async def relay(table: Table) -> Scores:
    """Cooperative, four seats: a word is passed on until the last says it; the second may leave early, the last comes late.

    All earn 1 if the word arrives. The second seat pays 0.2 for passing it on; if it leaves, the third hears the first. The last seat is
    told nothing, not even the rules, before its turn has come. Measures: `arrived`, `left`.
    """
    table.measure("arrived", 0.0)
    secret = table.rng.randint(1, WORDS)
    for seat in ("north", "east", "south"):
        table[seat].brief(f"game relay. you are {seat}.")
    said = await table["north"].act(f"the word is {secret}. pass it on.", word)
    passed = await table["east"].act(f"they say {said}. pass it on or leave.", word_or_leave)
    said = said if passed is None else passed
    said = await table["south"].act(f"they say {said}. pass it on.", word)
    table["west"].brief("game relay. you are west.")
    arrived = float(await table["west"].act(f"they say {said}. what is the word?", word) == secret)
    table.measure("arrived", arrived)
    table.measure("left", passed is None)
    return {seat.name: arrived - (COST if seat.name == "east" and passed is not None else 0.0) for seat in table}
