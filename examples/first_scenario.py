"""A first scenario: `opentinker run examples/first_scenario.py`. The README shows it whole, and the tests play it."""

from scenarios import Scores, Table, scenario


def word(reply: str) -> str:
    if reply not in ("cooperate", "defect"):
        raise ValueError("not a legal answer. say cooperate or defect.")  # the player hears this, and tries again
    return reply


@scenario(
    "alpha", "beta", version=1, retries=1, headline="passed", defaults={"learning": {"lr": 2e-3, "max_tokens": 6}}
)
async def narrow_lane(table: Table) -> Scores:
    """Two cars meet in a narrow lane: both earn 1 if exactly one of them cooperates, that is, gives way."""
    for seat in table:
        seat.brief(f"game dilemma. you are {seat.name}. there are 4 rounds. say cooperate or defect.")
    words = await table.act_all("round 1.", word)  # at once and unseen
    passed = float(set(words.values()) == {"cooperate", "defect"})  # no word from one of them: not passed
    table.measure("passed", passed)
    return {"alpha": passed, "beta": passed}
