"""Who is to blame when an episode does not simply finish: the scenario's author, a player, the runtime, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ScenarioError(Exception):
    """The scenario's author must change something; the message says what was found and what was expected."""


class Forfeit(Exception):
    """A player's turn is spent without a usable reply. Uncaught, it ends the episode with the declared forfeit scores.

    A scenario may raise it too: `raise Forfeit(seat.name, "moved out of turn")`.
    """

    def __init__(self, seat: str, reason: str) -> None:
        super().__init__(f"{seat}: {reason}")
        self.seat = seat
        self.reason = reason


class Dropped(Exception):
    """Raised by the runtime behind a table: it gives this episode up (drain, stop). Nobody is to blame, nothing is scored."""


class RecordingError(Exception):
    """A file of recordings cannot be read: whoever named it must name another, or use the version that wrote it."""


@dataclass(frozen=True, slots=True)
class Forfeited:
    """In place of a value: this seat gave no usable reply, and why. It is false, so `move or default` and `if move:` skip it
    (where 0 or "" are good values, ask `isinstance(move, Forfeited)`)."""

    seat: str
    reason: str

    def __bool__(self) -> Literal[False]:
        return False
