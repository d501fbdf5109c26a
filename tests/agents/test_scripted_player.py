"""Players that are functions, and players that say again what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from agents.players.player import Answer, Cut, Need, Reply
from agents.players.recorded import RecordedPlayer, ReplayMismatch
from agents.players.scripted import ScriptedPlayer
from tinker.protocol.episodes import Line
from tinker.protocol.values import BASE, Finish, SeatName

A = SeatName("a")
LINES = (
    Line(A, "brief", "You guess.", 0),
    Line(SeatName("b"), "hear", "not for you", 0),
    Line(A, "hear", "hot", 0),
    Line(A, "ask", "Guess:", 0),
    Line(A, "complaint", "five", 0),
    Line(A, "ask", "a digit, please", 1),
    Line(A, "complaint", "5 5 5 5", 1, cut="length"),
    Line(A, "forfeit", "truncated (length) (after 2 tries)", 1),
    Line(A, "ask", "Guess:", 2),
    Line(A, "forfeit", "the deadline passed", 2),
    Line(A, "ask", "Guess:", 3),
    Line(A, "reply", "5", 3),
)


def test_a_script_sees_what_its_seat_heard() -> None:
    def script(heard: Sequence[str], prompt: str, rng: Random) -> str:
        return f"{list(heard)} {prompt} {rng.randint(1, 9)}"

    one = ScriptedPlayer(script, Random(1))
    one.brief("be")
    one.hear("this")
    assert one.ask("Now?", attempt=0) == Reply(f"['be', 'this'] Now? {Random(1).randint(1, 9)}")
    with pytest.raises(ValueError, match="did not ask"):
        one.answer(Answer([], [], Finish.STOP, BASE))


def until_the_last_ask() -> RecordedPlayer:
    one = RecordedPlayer(A, LINES)
    one.brief("You guess.")
    one.hear("hot")
    assert one.ask("Guess:", attempt=0) == Reply("five")
    one.judged(accepted=False)
    assert one.ask("a digit, please", attempt=1) == Reply("5 5 5 5", Cut.LENGTH)
    one.judged(accepted=False)
    assert isinstance(one.ask("Guess:", attempt=0), Need)
    assert one.forfeit == "the deadline passed"
    return one


def test_a_recording_is_played_with_its_cuts_complaints_and_forfeits() -> None:
    one = until_the_last_ask()
    assert one.ask("Guess:", attempt=0) == Reply("5")
    assert one.forfeit == ""
    one.judged(accepted=True)
    one.finish()


def test_a_changed_prompt_is_named_with_seat_turn_and_both_texts() -> None:
    one = until_the_last_ask()
    with pytest.raises(
        ReplayMismatch, match=r"seat a, turn 3: the recording has ask 'Guess:', the replay ask 'Guess!'"
    ) as caught:
        one.ask("Guess!", attempt=0)
    assert (caught.value.seat, caught.value.turn) == ("a", 3)


def test_a_changed_brief_or_hearing_is_a_mismatch() -> None:
    one = RecordedPlayer(A, LINES)
    with pytest.raises(ReplayMismatch, match=r"turn 0: .*brief 'You guess.'.*brief 'You hint.'"):
        one.brief("You hint.")
    with pytest.raises(ReplayMismatch, match=r"hear 'You guess.'"):
        one.hear("You guess.")


def test_an_episode_that_goes_on_or_stops_early_is_a_mismatch() -> None:
    one = until_the_last_ask()
    with pytest.raises(ReplayMismatch, match="the end of the episode"):
        one.finish()
    one.ask("Guess:", attempt=0)
    with pytest.raises(ReplayMismatch, match="nothing more for this seat"):
        one.hear("more")


def test_a_parser_that_judges_otherwise_now_is_a_mismatch() -> None:
    one = until_the_last_ask()
    one.ask("Guess:", attempt=0)
    with pytest.raises(ReplayMismatch, match=r"reply '5'.*a reply that does not parse"):
        one.judged(accepted=False)


def test_a_recorded_seat_takes_no_generated_answer() -> None:
    with pytest.raises(ReplayMismatch, match="generated"):
        until_the_last_ask().answer(Answer([], [], Finish.STOP, BASE))
