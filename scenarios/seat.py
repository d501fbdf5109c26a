"""A named place at a table, as the scenario sees it. What a seat is told reaches its player alone."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from scenarios.act import Act
from scenarios.dealing import Dealer
from scenarios.errors import Forfeit, Forfeited
from tinker.protocol.values import SeatName

T = TypeVar("T")


class Seat:
    """One seat of one episode. A scenario never knows who sits there: a policy, a script, a human, a recording."""

    def __init__(self, name: SeatName, dealer: Dealer) -> None:
        self._name = name
        self._dealer = dealer

    def __repr__(self) -> str:
        return f"Seat({self._name!r})"

    @property
    def name(self) -> str:
        """The seat's name, as the scenario declared it."""
        return self._name

    def brief(self, text: str) -> None:
        """Standing instructions (a policy's system message): once, before anything else at this seat."""
        self._dealer.brief(self._name, text)

    def hear(self, text: str) -> None:
        """Tell this seat, and no other, something; it is part of its next prompt."""
        self._dealer.hear(self._name, text)

    def act(self, prompt: str, parse: Callable[[str], T]) -> Coroutine[Any, Any, T]:
        """Ask this seat for a reply and return it parsed.

        `parse` raises ValueError with a message for the player; the seat then tries again while the scenario's retries last. A reply
        that was cut off is never parsed. Raises `Forfeit` when no usable reply came. Nothing happens before it is awaited.
        """
        return Act(self._dealer.promises, "act", lambda: self._act(prompt, parse))

    async def _act(self, prompt: str, parse: Callable[[str], T]) -> T:
        outcome = (await self._dealer.deal({self._name: prompt}, {self._name: parse}))[self._name]
        if isinstance(outcome, Forfeited):
            raise Forfeit(outcome.seat, outcome.reason)
        return outcome
