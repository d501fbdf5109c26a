"""Play a game of `envs` at a table: this is all it takes to make a scenario of one.

```python
@scenario("alpha", "beta", version=1)
async def nim(table: Table) -> Scores:
    "Nim."
    return (await play(table, Nim.start(table.rng))).scores()
```
"""

from __future__ import annotations

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
        game = game.apply(await _moves(table, game, acting))
    return game


async def _moves(table: Table, game: Game[Any], acting: tuple[str, ...]) -> dict[str, Any]:
    if len(acting) == 1:
        (seat,) = acting
        return {seat: await table[seat].act(game.view(seat), lambda text: game.parse(seat, text))}
    replies = await table.act_all({seat: game.view(seat) for seat in acting}, lambda text: _read(game, acting, text))
    return {seat: _move(game, seat, reply) for seat, reply in replies.items()}


def _read(game: Game[Any], acting: tuple[str, ...], text: str) -> str:
    """A turn has one parser for all its seats: here it takes what is legal for at least one of them."""
    refusals = []
    for seat in acting:
        try:
            game.parse(seat, text)
        except ValueError as error:
            refusals.append(error)
        else:
            return text
    raise refusals[0]


def _move(game: Game[Any], seat: str, reply: str | Forfeited) -> Any:
    if isinstance(reply, Forfeited):
        raise Forfeit(seat, reply.reason)
    try:
        return game.parse(seat, reply)
    except ValueError as error:
        raise Forfeit(seat, str(error)) from error
