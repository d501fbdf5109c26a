"""Small scenarios whose every turn shape occurs: one seat, all seats, some seats, retries, forfeits, held-out evaluations."""

from __future__ import annotations

import random
from collections.abc import Sequence

from scenarios import Evaluation, Scores, Table, scenario

DEFAULTS = {"learning": {"max_tokens": 4}}


def digit(text: str) -> int:
    if not text[:1].isdigit():
        raise ValueError("a digit")
    return int(text[0])


def five(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    return "5"


@scenario("ann", "bob", version=1, retries=1, defaults=DEFAULTS, evaluations=(Evaluation("even", 1, "sum"),))
async def pair(table: Table) -> Scores:
    """Both at once, then Ann alone."""
    said = await table.act_all("go", digit)
    sums = {seat: float(value) if isinstance(value, int) else -1.0 for seat, value in said.items()}
    table.say("ann", "more")
    sums["ann"] += await table["ann"].act("on", digit)
    table.measure("sum", sum(sums.values()))
    return sums


@scenario(
    "ann",
    version=1,
    retries=2,
    defaults=DEFAULTS,
    evaluations=(Evaluation("even", 1, "right"),),
)
async def solo(table: Table) -> Scores:
    """Ann alone, twice."""
    first = await table["ann"].act(f"say {table.rng.randrange(10)}", digit)
    second = await table["ann"].act("on", digit)
    table.measure("right", float(first == second))
    return {"ann": first + second}


@scenario("ann", "bob", "cy", version=1, defaults=DEFAULTS, evaluations=(Evaluation("odd", 1, "sum", {"cy": five}),))
async def trio(table: Table) -> Scores:
    """Two act, one waits; then the third; whoever does not parse forfeits the episode or its score."""
    first = await table.act_all("go", digit, ["ann", "cy"])
    sums = {seat: float(value) if isinstance(value, int) else -1.0 for seat, value in first.items()}
    sums["bob"] = float(await table["bob"].act("on", digit))
    table.measure("sum", sum(sums.values()))
    return sums


SCENARIOS = (pair, solo, trio)
