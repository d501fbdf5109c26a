"""A player that says again what a recording says, and checks that it hears and is asked the same.

A scenario that was changed, or that uses other randomness than its table's, is found at the first line that differs.
"""

from __future__ import annotations

from collections.abc import Iterable

from agents.players.player import Answer, Cut, Need, Reply
from tinker.protocol.episodes import Line
from tinker.protocol.values import BASE, Sampling, SeatName


class ReplayMismatch(Exception):
    """The episode took another course than its recording: at this seat and turn `got` came instead of `expected`."""

    def __init__(self, seat: str, turn: int, expected: str, got: str) -> None:
        super().__init__(
            f"seat {seat}, turn {turn}: the recording has {expected}, the replay {got}; "
            "the scenario (or its parameters) changed since: raise its version, or record again"
        )
        self.seat = seat
        self.turn = turn
        self.expected = expected
        self.got = got


class RecordedPlayer:
    """A `Player` made from the lines of one recording; those of other seats are ignored.

    Replies come back with their cuts, parsed or not. Where the recording has a forfeit without a reply (a passed deadline), `ask` returns
    a `Need` that nobody can answer, and `forfeit` is the recorded reason: the turns of a replay hand that seat a forfeit.
    """

    def __init__(self, seat: SeatName, lines: Iterable[Line]) -> None:
        self._seat = seat
        self._lines = tuple(line for line in lines if line.seat == seat)
        self._next = 0
        self._forfeit = ""

    @property
    def forfeit(self) -> str:
        """Why the seat forfeited the turn it was last asked in, without a reply; "" if it did not."""
        return self._forfeit

    def brief(self, text: str) -> None:
        self._expect("brief", text)

    def hear(self, text: str) -> None:
        self._expect("hear", text)

    def ask(self, prompt: str, *, attempt: int) -> Need | Reply:
        self._forfeit = ""
        self._expect("ask", prompt)
        line = self._peek()
        if line is None or line.kind not in ("reply", "complaint", "forfeit"):
            raise ReplayMismatch(self._seat, self._turn(), _described(line), "a seat that must reply")
        self._next += 1
        if line.kind == "forfeit":
            self._forfeit = line.text
            return Need(BASE, [], Sampling(max_tokens=0))
        return Reply(line.text, Cut(line.cut))

    def answer(self, answer: Answer) -> Reply:
        raise ReplayMismatch(self._seat, self._turn(), "a reply or a forfeit of its own", "an answer generated for it")

    def judged(self, *, accepted: bool) -> None:
        """The recording knows which replies parsed: a reply that was accepted is a `reply` line, else a `complaint`."""
        last = self._lines[self._next - 1] if self._next else None
        if last is not None and last.kind in ("reply", "complaint") and accepted != (last.kind == "reply"):
            got = "a reply that parses" if accepted else "a reply that does not parse"
            raise ReplayMismatch(self._seat, last.turn, _described(last), got)

    def finish(self) -> None:
        """The episode has ended: ReplayMismatch if the recording goes on."""
        self._skip_spent_forfeits()
        if (line := self._peek()) is not None:
            raise ReplayMismatch(self._seat, line.turn, _described(line), "the end of the episode")

    def _expect(self, kind: str, text: str) -> None:
        self._skip_spent_forfeits()
        line = self._peek()
        if line is None or line.kind != kind or line.text != text:
            raise ReplayMismatch(self._seat, self._turn(), _described(line), f"{kind} {text!r}")
        self._next += 1

    def _skip_spent_forfeits(self) -> None:
        """A forfeit after complaints says only that the retries were spent; the complaints themselves were replayed."""
        while (line := self._peek()) is not None and line.kind == "forfeit":
            self._next += 1

    def _peek(self) -> Line | None:
        return self._lines[self._next] if self._next < len(self._lines) else None

    def _turn(self) -> int:
        at = self._peek() or (self._lines[-1] if self._lines else None)
        return at.turn if at is not None else 0


def _described(line: Line | None) -> str:
    return f"{line.kind} {line.text!r}" if line is not None else "nothing more for this seat"
