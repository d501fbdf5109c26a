"""How a turn is dealt: admit seats, have their replies made in one go, and judge them in seat order once all are in.

Replies that do not parse open a sub-turn that admits only their seats, until the scenario's retries are spent. This is the one place
where players, parsers and the turns behind the table are entered. The first thing that goes wrong other than a forfeit is kept as the
episode's fault, so that a scenario that catches exceptions cannot hide it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from anyio.lowlevel import checkpoint

from agents.players.player import Answer, Cut, Need, Player, Reply
from scenarios.act import Promises
from scenarios.blame import left
from scenarios.errors import Forfeited, ScenarioError
from scenarios.recording import Recorder
from scenarios.turns import Turns
from tinker.protocol.values import SeatName

T = TypeVar("T")
Parser = Callable[[str], T]

MAX_TEXT = 200_000  # characters of one prompt, brief, hearing or reply: far above any context, far below what hurts
MAX_COMPLAINT = 2_000  # characters of a parser's message that a player hears


@dataclass(frozen=True, slots=True)
class Said:
    """One seat's reply in one (sub-)turn, with the sampled ids where a policy made it."""

    reply: Reply
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Complaint:
    """A reply was not accepted; what its player is told."""

    text: str
    cut: Cut = Cut.NO


@dataclass(frozen=True, slots=True)
class Broken:
    """The parser itself failed; raised once everybody's reply is recorded."""

    error: ScenarioError


class TurnLimit(Exception):
    """The episode wants more turns than it may have."""


class Dealer:
    """The state of one episode's table: whose players, which turn, what was recorded, and what went wrong.

    `give_up` is called when the scenario goes on acting after a fault; it must cancel the scenario. `clock` is in seconds; `outside` is
    what it measured in turns and players, so not in the scenario and its parsers.
    """

    def __init__(
        self,
        players: Mapping[SeatName, Player],
        turns: Turns,
        *,
        retries: int,
        max_turns: int,
        clock: Callable[[], float],
        give_up: Callable[[], None],
    ) -> None:
        self.seats = tuple(players)
        self.recorder = Recorder()
        self.promises = Promises(self.misuse)
        self.fault: Exception | None = None
        self.outside = 0.0
        self._players = players
        self._turns = turns
        self._retries = retries
        self._max_turns = max_turns
        self._clock = clock
        self._give_up = give_up
        self._number = 0
        self._admitted: tuple[SeatName, ...] = ()
        self._ended = False

    # --- what a scenario does ---

    def brief(self, seat: SeatName, text: str) -> None:
        """Standing instructions for one seat, before anything else there."""
        with self.blaming():
            self.check_running("brief")
            self._check_text("brief", seat, text)
            if self.recorder.has_lines(seat):
                raise ScenarioError(
                    f"seat {seat!r} is briefed after other things; brief it once, before it hears or acts"
                )
            self.recorder.add(seat, "brief", text, self._number)
            self._players[seat].brief(text)

    def hear(self, seat: SeatName, text: str) -> None:
        """Something that reaches one seat."""
        with self.blaming():
            self.check_running("hear")
            self._check_text("hear", seat, text)
            self.recorder.add(seat, "hear", text, self._number)
            self._players[seat].hear(text)

    async def deal(
        self, prompts: Mapping[SeatName, str], parsers: Mapping[SeatName, Parser[T]]
    ) -> dict[SeatName, T | Forfeited]:
        """One turn of the seats in `prompts` (in seat order), with its sub-turns: a value or a `Forfeited` each, in that order."""
        if self.fault is not None:
            self._give_up()
            await checkpoint()
            raise self.fault
        with self.blaming():
            self.check_running("act")
            for seat, prompt in prompts.items():
                self._check_text("prompt", seat, prompt)
            self._admitted = tuple(prompts)
            try:
                return await self._deal(prompts, parsers)
            finally:
                self._admitted = ()

    def misuse(self, text: str) -> ScenarioError:
        """The author's error, to be raised; it is the episode's fault if it is the first."""
        error = ScenarioError(text)
        self.fault = self.fault or error
        return error

    def end(self) -> None:
        """The scenario has returned; nothing may happen at this table any more."""
        self._ended = True

    # --- blame ---

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Whatever is raised inside is the episode's fault, if it is the first."""
        try:
            yield
        except SystemExit as exit:
            error = left(exit)
            self.fault = self.fault or error
            raise error from None
        except Exception as error:
            self.fault = self.fault or error
            raise

    def check_running(self, what: str) -> None:
        """ScenarioError if the episode has ended, or a turn is open."""
        if self._ended:
            raise ScenarioError(
                f"{what} at a table whose episode has ended; await everything you start before you return the scores"
            )
        if self._admitted:
            raise ScenarioError(
                f"{what} while the turn of {', '.join(self._admitted)} is open; await it first (table.act_all lets seats act at once)"
            )

    def _check_text(self, what: str, seat: SeatName, text: object) -> None:
        if not isinstance(text, str):
            raise ScenarioError(f"{what} for seat {seat!r} is {text!r:.200} ({type(text).__name__}); expected a string")
        if flaw := _flaw(text):
            raise ScenarioError(f"{what} for seat {seat!r} {flaw}")

    # --- one turn ---

    async def _deal(
        self, prompts: Mapping[SeatName, str], parsers: Mapping[SeatName, Parser[T]]
    ) -> dict[SeatName, T | Forfeited]:
        outcomes: dict[SeatName, T | Forfeited] = {}
        asking = dict(prompts)
        for attempt in range(self._retries + 1):
            number = self._next_number()
            replies = await self._replies(number, asking, attempt)
            judged = {seat: self._judge(number, seat, said, parsers[seat]) for seat, said in replies.items()}
            for verdict in judged.values():
                if isinstance(verdict, Broken):
                    raise verdict.error
            asking = {}
            for seat, verdict in judged.items():
                if isinstance(verdict, Complaint):
                    if (
                        attempt < self._retries and verdict.cut is not Cut.CONTEXT
                    ):  # a full context has no room for another try
                        asking[seat] = verdict.text
                    else:
                        outcomes[seat] = self._forfeit(number, seat, verdict, attempt + 1)
                elif not isinstance(verdict, Broken):
                    outcomes[seat] = verdict
            if not asking:
                break
        return {seat: outcomes[seat] for seat in prompts}

    def _next_number(self) -> int:
        if self._number >= self._max_turns:
            raise TurnLimit(
                f"the scenario wants more than {self._max_turns} turns, sub-turns included; end it earlier or raise max_turns"
            )
        self._number += 1
        return self._number - 1

    async def _replies(
        self, number: int, prompts: Mapping[SeatName, str], attempt: int
    ) -> dict[SeatName, Said | Forfeited]:
        """Everybody's reply or forfeit, recorded, in seat order, when all are in."""
        started = self._clock()
        try:
            said: dict[SeatName, Said | Forfeited] = {}
            needs: dict[SeatName, Need] = {}
            for seat, prompt in prompts.items():
                self.recorder.add(seat, "ask", prompt, number)
            for seat, prompt in prompts.items():
                asked = self._players[seat].ask(prompt, attempt=attempt)
                if isinstance(asked, Need):
                    needs[seat] = asked
                else:
                    said[seat] = Said(asked)
            answers = await self._answers(number, needs)
            for seat in needs:
                answer = answers[seat]
                if isinstance(answer, Forfeited):
                    self.recorder.add(seat, "forfeit", answer.reason, number)
                    said[seat] = Forfeited(seat, answer.reason)
                else:
                    said[seat] = Said(self._players[seat].answer(answer), tuple(answer.ids))
            return {seat: said[seat] for seat in prompts}
        finally:
            self.outside += self._clock() - started

    async def _answers(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        if not needs:
            await checkpoint()  # so that a table of scripts alone lets others run, and can be timed out
            return {}
        answers = await self._turns.open(number, needs)
        if set(answers) != set(needs):
            raise RuntimeError(f"turn {number} admitted {', '.join(needs)} and closed with {', '.join(answers)}")
        return answers

    def _judge(
        self, number: int, seat: SeatName, said: Said | Forfeited, parse: Parser[T]
    ) -> T | Forfeited | Complaint | Broken:
        """Parse one reply, record it, and tell the player whether it was accepted."""
        if isinstance(said, Forfeited):
            return said
        reply = said.reply
        verdict = _complaint_of_cut(reply.cut) if reply.cut else _parsed(seat, reply.text, parse)
        accepted = not isinstance(verdict, Complaint)
        kind = "reply" if accepted else "complaint"
        self.recorder.add(seat, kind, reply.text, number, ids=said.ids, cut=str(reply.cut))
        self._players[seat].judged(accepted=accepted)
        return verdict

    def _forfeit(self, number: int, seat: SeatName, complaint: Complaint, tries: int) -> Forfeited:
        why = f"truncated ({complaint.cut})" if complaint.cut else complaint.text
        reason = f"{why} (after {tries} {'try' if tries == 1 else 'tries'})"
        self.recorder.add(seat, "forfeit", reason, number)
        return Forfeited(seat, reason)


def _complaint_of_cut(cut: Cut) -> Complaint:
    limit = "its length limit" if cut is Cut.LENGTH else "the end of your context"
    return Complaint(f"Your reply was cut off at {limit}. Reply again, shorter.", cut)


def _flaw(text: str) -> str:
    """Why a text can be given to nobody; "" if it can."""
    if len(text) > MAX_TEXT:
        return f"has {len(text)} characters; at most {MAX_TEXT} are allowed"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is no valid Unicode: {error}"
    return ""


def _parsed(seat: SeatName, text: str, parse: Parser[T]) -> T | Complaint | Broken:
    if flaw := _flaw(text):
        return Complaint(f"Your reply {flaw}.")
    try:
        value = parse(text)
    except ValueError as error:
        return Complaint((str(error) or "That reply could not be read.")[:MAX_COMPLAINT])
    except (Exception, SystemExit) as error:
        broken = ScenarioError(
            f"the parser of seat {seat!r} raised {type(error).__name__}: {error}; "
            "expected a value, or ValueError with a message for the player"
        )
        broken.__cause__ = error
        return Broken(broken)
    if inspect.iscoroutine(value):
        value.close()
        return Broken(
            ScenarioError(f"the parser of seat {seat!r} is an `async def`; expected a plain function (str) -> value")
        )
    return value
