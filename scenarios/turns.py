"""The waist between a table and whatever generates replies for it.

A table opens one turn at a time; behind `Turns` may be the coordinator, a fake in a test, or a recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agents.players.player import Answer, Need
from scenarios.errors import Forfeited
from tinker.protocol.values import SeatName


class Turns(Protocol):
    """Where generations are had, for the table of one episode."""

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        """Admit these seats (given in seat order), and return when the last of them has answered or forfeited.

        `number` rises within the episode, with gaps where nothing had to be generated. The turn's deadline is kept here: a seat that
        passes it comes back as `Forfeited`, and no seat's failure cancels another. Raises `Dropped` if the runtime gives the episode up;
        anything else it raises fails the episode. Cancelled when the episode passes its own deadline.
        """
