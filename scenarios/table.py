"""A table: one running episode as its scenario sees it. Seats hear things and act; turns are dealt one at a time.

Turn order is the order of the scenario's statements: while a turn is open nothing else may happen at the table, so that an episode never
depends on who was first. `table.rng` is the only randomness; a scenario that uses another one cannot be replayed. A scenario may await
foreign things too (a tool, `anyio.sleep`); only the episode's deadline limits those, and a replay does them again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, SupportsFloat, TypeVar

from scenarios.act import Act
from scenarios.dealing import Dealer
from scenarios.errors import Forfeited
from scenarios.numeric import read_measure
from scenarios.parameters import closest
from scenarios.seat import Seat
from tinker.protocol.values import SeatName

T = TypeVar("T")


class Table:
    """Made by `play_episode`, one per episode; of use until the scenario returns."""

    def __init__(self, dealer: Dealer, rng: Random) -> None:
        self.rng = rng
        self._dealer = dealer
        self._seats = {seat: Seat(seat, dealer) for seat in dealer.seats}
        self._measures: dict[str, float] = {}

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def __len__(self) -> int:
        return len(self._seats)

    def __getitem__(self, name: str) -> Seat:
        return self._seats[self._known(name)]

    @property
    def measures(self) -> Mapping[str, float]:
        """What was measured so far."""
        return dict(self._measures)

    def say(self, seat: Seat | str, text: str) -> None:
        """Every seat but this one hears the text, word for word (say in it who speaks, where that matters)."""
        speaker = self._known(seat)
        for other in self._seats:
            if other != speaker:
                self._dealer.hear(other, text)

    def measure(self, name: str, value: SupportsFloat) -> None:
        """A number about this episode for the run's metrics. Measured again, the later value counts: measure `success` as 0 first and
        as 1 when it is reached, and an episode that ends early counts as well. None and NaN are refused."""
        with self._dealer.blaming():
            self._dealer.check_running("measure")
            self._measures[name] = read_measure(name, value)

    def act_all(
        self,
        prompt: str | Mapping[str, str],
        parse: Callable[[str], T] | Mapping[str, Callable[[str], T]],
        seats: Sequence[Seat | str] | None = None,
    ) -> Coroutine[Any, Any, dict[str, T | Forfeited]]:
        """All seats (or these, or those with a prompt of their own) act at once and unseen. `parse`: for all, or one for each seat.

        Returns a value or a `Forfeited` per seat, in seat order, once the last has parsed or spent its retries. Never raises `Forfeit`.
        Nothing happens before it is awaited.
        """
        return Act(self._dealer.promises, "act_all", lambda: self._act_all(prompt, parse, seats))

    async def _act_all(
        self,
        prompt: str | Mapping[str, str],
        parse: Callable[[str], T] | Mapping[str, Callable[[str], T]],
        seats: Sequence[Seat | str] | None,
    ) -> dict[str, T | Forfeited]:
        prompts = {self._known(seat): text for seat, text in prompt.items()} if isinstance(prompt, Mapping) else {}
        shared = "" if isinstance(prompt, Mapping) else prompt
        default: Iterable[Seat | str] = prompts if isinstance(prompt, Mapping) else self._seats
        named = [self._known(seat) for seat in (default if seats is None else seats)]
        if len(set(named)) != len(named):
            raise self._dealer.misuse(f"act_all names a seat twice: {', '.join(named)}")
        if isinstance(prompt, Mapping) and set(prompts) != set(named):
            raise self._dealer.misuse(
                f"act_all has prompts for {', '.join(prompts) or 'nobody'} and seats {', '.join(named) or 'none'}; "
                "give each seat one prompt"
            )
        parsers = (
            {self._known(seat): one for seat, one in parse.items()}
            if isinstance(parse, Mapping)
            else dict.fromkeys(named, parse)
        )
        if not set(named) <= set(parsers):
            raise self._dealer.misuse(
                f"act_all has parsers for {', '.join(parsers) or 'nobody'} and seats {', '.join(named)}; give each seat one parser"
            )
        admitted = {seat: prompts.get(seat, shared) for seat in self._seats if seat in named}
        outcomes = await self._dealer.deal(admitted, parsers)
        return {str(seat): outcome for seat, outcome in outcomes.items()}

    def _known(self, seat: Seat | str) -> SeatName:
        name = seat.name if isinstance(seat, Seat) else seat
        if name not in self._dealer.seats:
            raise self._dealer.misuse(
                f"there is no seat {name!r} at this table{closest(str(name), self._dealer.seats)}; seats: {', '.join(self._dealer.seats)}"
            )
        return SeatName(name)
