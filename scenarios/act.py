"""An act is what `seat.act` and `table.act_all` return: it happens when it is awaited, once, and its author is told where it never was.

Nothing begins before the `await`, so a forgotten one leaves no warning of Python's behind, but fails the episode with the line.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from scenarios.blame import author
from scenarios.errors import ScenarioError

T_co = TypeVar("T_co", covariant=True)

AWAITS = {"act": "await seat.act(...)", "act_all": "await table.act_all(...)"}
MOST_OPEN = 1_000  # acts that wait to be awaited: a loop that forgets the `await` never lets anybody else run


class Promises:
    """The acts of one episode that were made and not yet awaited. `misuse` makes an error that is the episode's fault."""

    def __init__(self, misuse: Callable[[str], ScenarioError]) -> None:
        self.misuse = misuse
        self._made = 0
        self._open: dict[int, str] = {}  # by number, oldest first

    @property
    def broken(self) -> str:
        """The complaint about the oldest act that nobody has awaited; "" if there is none."""
        return next(iter(self._open.values()), "")

    def make(self, complaint: str) -> int:
        """A new act; its number."""
        if len(self._open) >= MOST_OPEN:
            raise self.misuse(self.broken)
        self._made += 1
        self._open[self._made] = complaint
        return self._made

    def keep(self, number: int) -> None:
        """This act is awaited now. ScenarioError if one that was made before it was not: the scenario went on without it."""
        self._open.pop(number, None)
        if next(iter(self._open), number) < number:
            raise self.misuse(self.broken)


class Act(Coroutine[Any, Any, T_co]):
    """A turn to be awaited: a coroutine in everything (type checkers find a forgotten `await` as usual), but for the warning when it
    is dropped, in whose place the episode fails.

    It is never the value itself: taken for one (compared, tested, indexed, iterated) it raises ScenarioError.
    """

    def __init__(self, promises: Promises, call: str, begin: Callable[[], Coroutine[Any, Any, T_co]]) -> None:
        self._promises = promises
        self._call = f"`{call}` at {author()}"
        self._complaint = f"{self._call} was never awaited: write `{AWAITS[call]}`"
        self._begin = begin
        self._running: Coroutine[Any, Any, T_co] | None = None
        self._number = promises.make(self._complaint)

    def __repr__(self) -> str:
        return f"<{self._call}>"

    def __await__(self) -> Generator[Any, Any, T_co]:
        if self._running is not None:
            raise self._promises.misuse(f"{self._call} is awaited twice; keep what the first `await` returned")
        return self._started().__await__()

    def send(self, value: Any, /) -> Any:
        return self._started().send(value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None, /) -> Any:
        return self._started().throw(kind) if value is None else self._started().throw(kind, value, trace)

    def close(self) -> None:
        self._started().close()

    def _started(self) -> Coroutine[Any, Any, T_co]:
        if self._running is None:
            self._promises.keep(self._number)
            self._running = self._begin()
        return self._running

    # --- taken for its value ---

    def _taken(self) -> ScenarioError:
        if self._running is None:
            return self._promises.misuse(self._complaint)
        return self._promises.misuse(f"{self._call} is not the reply; use what `await` returned")

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> NoReturn:
        raise self._taken()

    def __bool__(self) -> NoReturn:
        raise self._taken()

    def __len__(self) -> NoReturn:
        raise self._taken()

    def __iter__(self) -> NoReturn:
        raise self._taken()

    def __getitem__(self, key: object) -> NoReturn:
        raise self._taken()
