"""Small scenarios for system tests: what goes wrong in them goes wrong on purpose."""

from __future__ import annotations

import anyio
import numpy as np

from scenarios import Scores, Table, scenario

DEFAULTS = {"learning": {"max_tokens": 6}}


def number(text: str) -> int:
    """The one digit of a reply."""
    digits = [char for char in text if char.isdigit()]
    if len(digits) != 1:
        raise ValueError("say one digit")
    return int(digits[0])


@scenario("ann", "bob", version=1, defaults=DEFAULTS)
async def three_turns(table: Table) -> Scores:
    """Both speak three times; each scores the sum of its digits."""
    sums = dict.fromkeys(("ann", "bob"), 0.0)
    for _ in range(3):
        said = await table.act_all("A digit:", lambda text: number(text) if any(c.isdigit() for c in text) else 0)
        for seat, value in said.items():
            sums[seat] += value if isinstance(value, int) else 0
    return sums


@scenario("ann", "bob", version=1, retries=1, defaults=DEFAULTS)
async def strict(table: Table) -> Scores:
    """Two turns in which only digits are accepted, with one retry; a seat that forfeits scores -1."""
    sums = dict.fromkeys(("ann", "bob"), 0.0)
    for turn in range(2):
        for seat, value in (await table.act_all(f"Turn {turn}, a digit:", number)).items():
            sums[seat] += value if isinstance(value, int) else -1.0
        table.say("ann", "go on")
    return sums


@scenario("ann", version=1, defaults=DEFAULTS)
async def echo(table: Table) -> Scores:
    """Ann is told a number and scores what she repeats."""
    secret = table.rng.randrange(10)
    heard = await table["ann"].act(f"say {secret}", number)
    table.measure("secret", secret)
    table.measure("right", heard == secret)
    return {"ann": heard}


@scenario("ann", "bob", "cy", version=1, defaults=DEFAULTS)
async def three_players(table: Table) -> Scores:
    """Each scores its digit."""
    said = await table.act_all("A digit:", number)
    return {seat: value if isinstance(value, int) else -1 for seat, value in said.items()}


@scenario("ann", "bob", "cy", version=1, defaults=DEFAULTS)
async def silent_bob(table: Table) -> Scores:
    """Ann and Cy act, Bob never does."""
    said = await table.act_all("A digit:", number, ["ann", "cy"])
    return {"bob": 0, **{seat: value if isinstance(value, int) else -1 for seat, value in said.items()}}


@scenario("ann", version=1, defaults=DEFAULTS)
async def moody(table: Table, *, mood: str = "raise", share: float = 0.5) -> Scores:
    """Goes wrong in a share of its episodes, in the way its mood says; Ann scores her digit otherwise."""
    bad = table.rng.random() < share
    value = await table["ann"].act("A digit:", number)
    if not bad:
        return {"ann": value}
    match mood:
        case "raise":
            raise KeyError("the tool has no such page")
        case "nan":
            return {"ann": float("nan")}
        case "none":
            return {"ann": None}  # type: ignore[dict-item]
        case "seats":
            return {"ann": 1, "bob": 2}
        case "wait":
            await anyio.sleep_forever()
        case "endless":
            while True:
                await table["ann"].act("Another digit:", number)
        case "array":
            return {"ann": np.array([1, 2])}  # type: ignore[dict-item]
    raise AssertionError(mood)


@scenario("ann", "bob", version=1, defaults=DEFAULTS)
async def numpy_numbers(table: Table) -> Scores:
    """Scores and measures as numpy makes them."""
    said = await table.act_all("A digit:", number)
    table.measure("flag", np.bool_(True))
    table.measure("half", np.float32(0.5))
    ann = said["ann"]
    return {"ann": np.float32(0.5) * np.int64(ann if isinstance(ann, int) else 0), "bob": np.array([3])}  # type: ignore[dict-item]
