"""Colours: for a real language model. One agent knows a colour and says it, the other has to name it; both are paid for understanding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from scenarios.scenario import Evaluation, ForfeitScores, Scores, scenario
from scenarios.table import Table

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "pink", "orange")


def named(text: str) -> list[str]:
    """The colours in a text, each once."""
    words = re.findall(r"[a-z]+", text.lower())
    return [colour for colour in COLOURS if colour in words]


def one_colour(text: str) -> str:
    """The one colour of a reply."""
    found = named(text)
    if len(found) != 1:
        raise ValueError(f"Name one colour, not {' and '.join(found) or 'none'}.")
    return found[0]


def plain_speaker(heard: Sequence[str], prompt: str, rng: Random) -> str:
    """Says the colour that it was told."""
    return f"The colour is {named(prompt)[0]}."


def plain_listener(heard: Sequence[str], prompt: str, rng: Random) -> str:
    """Says the colour that it was told, or any, if it was told none."""
    return f"{(named(prompt) or [rng.choice(COLOURS)])[0].capitalize()}."


@scenario(
    "speaker",
    "listener",
    version=1,
    forfeit=ForfeitScores(own=0.0, others=0.0),
    learn_from_forfeits=True,
    defaults={
        "rounds": 16,
        "groups": 4,
        "group_size": 8,
        "evaluate_every": 8,
        "replies": ["The colour is red.", "Blue.", "I do not know.", "green"],
        "learning": {
            "algorithm": "grpo",
            "scale": "batch",
            "lr": 5e-4,
            "warmup": 3,
            "temperature": 0.5,
            "max_tokens": 8,
        },
    },
    evaluations=(Evaluation("held-out", episodes=16, measure="right"),),
    headline="right",
    baselines={"speaker": plain_speaker, "listener": plain_listener},
)
async def colours(table: Table) -> Scores:
    """Cooperative, for a model that knows English: a speaker says one of eight colours, a listener names it; both earn 1 if it is right.

    A reply that was cut off, or that does not name one colour when the listener is asked, ends the episode with 0 for both.
    Measures: `right`, and `named`, whether the listener named one colour at all.
    """
    table.measure("named", 0.0)
    table.measure("right", 0.0)
    speaker, listener = table["speaker"], table["listener"]
    speaker.brief("Be brief.")
    listener.brief("Be brief.")
    colour = table.rng.choice(COLOURS)
    said = await speaker.act(f"The secret colour is {colour}. Tell your partner the colour.", str)
    answer = await listener.act(
        f"Your partner said: {said.strip()}\nWhat is the colour? Answer with one word.", one_colour
    )
    right = float(answer == colour)
    table.measure("named", 1.0)
    table.measure("right", right)
    return {"speaker": right, "listener": right}
