"""Play a game of `envs` at a table: this is all it takes to make a scenario of one.

```python
@scenario("alpha", "beta", version=1)
async def nim(table: Table) -> Scores:
    "Nim."
    return (await play(table, Nim.start(table.rng))).scores()
```
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from envs.game import Game
from scenarios.errors import Forfeit, Forfeited
from scenarios.table import Table

G = TypeVar("G", bound=Game[Any])


async def play(table: Table, game: G) -> G:
    """Brief every seat, ask who must act until the game is over, and return its last position.

    Raises `Forfeit` when a seat gives no legal answer; of several at once, for the first in seat order.
    """
    for name in game.seats:
        table[name].brief(game.brief(name))
    while acting := game.to_act():
        views = {seat: game.view(seat) for seat in acting}
        replies = await table.act_all(views, {seat: partial(game.parse, seat) for seat in acting})
        for reply in replies.values():
            if isinstance(reply, Forfeited):
                raise Forfeit(reply.seat, reply.reason)
        game = game.apply(replies)
    return game
