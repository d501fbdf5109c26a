"""The policy player: a context that only grows, and a trajectory that is exactly what was sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.players.player import Answer, Cut, Need, Reply
from agents.players.policy import Playing, PolicyPlayer
from tests.toy_tokens import abc_json, byte_level_json, chat, tokenizer
from tinker.protocol.episodes import Span, Trajectory
from tinker.protocol.seeds import derive
from tinker.protocol.values import AgentName, Finish, PolicyName, PolicyVersion, SeatName, unpack_floats, unpack_ids
from tinker.tokens import ChatTemplate

POLICY = PolicyVersion(PolicyName("x"), 3)
END = chat().tokenizer.encode_frame("<|im_end|>")[0]


def player(
    template: ChatTemplate | None = None, *, context: int = 10_000, max_tokens: int = 16, learns: bool = False
) -> PolicyPlayer:
    playing = Playing(AgentName("x"), SeatName("left"), POLICY, max_tokens, context, learn_from_forfeits=learns)
    return PolicyPlayer(template or chat(), playing, lambda ask: derive(7, ask))


def sampled(
    ids: Sequence[int], finish: Finish = Finish.STOP, version: int = 3, logprobs: Sequence[float] | None = None
) -> Answer:
    given = [-0.5] * len(ids) if logprobs is None else list(logprobs)
    return Answer(list(ids), given, finish, PolicyVersion(PolicyName("x"), version))


def needed(one: PolicyPlayer, prompt: str = "go", attempt: int = 0) -> Need:
    asked = one.ask(prompt, attempt=attempt)
    assert isinstance(asked, Need)
    return asked


def take_turn(
    one: PolicyPlayer, ids: Sequence[int], *, accepted: bool = True, attempt: int = 0, **how: object
) -> list[int]:
    """One ask and answer; returns the prompt."""
    prompt = needed(one, attempt=attempt).prompt
    one.answer(sampled(ids, **how))  # type: ignore[arg-type]
    one.judged(accepted=accepted)
    return prompt


def masked_ids(trajectory: Trajectory) -> list[int]:
    return [index for index, on in zip(unpack_ids(trajectory.ids), trajectory.mask, strict=True) if on]


def said(text: str) -> list[int]:
    return [*chat().tokenizer.encode(text), END]


def test_f1_the_next_prompt_begins_with_what_was_sampled_not_with_its_reencoded_text() -> None:
    template = ChatTemplate(tokenizer(abc_json(), "{% for m in messages %}U: {{ m.content }}<|im_end|>{% endfor %}A:"))
    one = player(template)
    first = take_turn(one, [0, 5], finish=Finish.LENGTH, logprobs=[-0.1, -0.2])
    assert needed(one).prompt[: len(first) + 2] == [*first, 0, 5]
    trajectory = one.trajectory()
    assert masked_ids(trajectory) == [0, 5]
    assert unpack_floats(trajectory.logprobs)[len(first) : len(first) + 2] == pytest.approx([-0.1, -0.2])


def test_what_a_seat_heard_is_part_of_its_next_prompt_only() -> None:
    one = player()
    one.brief("You guess.")
    one.hear("It is 3 to 7.")
    assert needed(one, "Guess:").prompt == chat().opening("You guess.", "It is 3 to 7.\nGuess:")
    one.answer(sampled(said("5")))
    one.judged(accepted=True)
    prompt = needed(one, "Again:").prompt
    assert prompt[-len(chat().continuation("Again:", closed=True)) :] == chat().continuation("Again:", closed=True)


@pytest.mark.parametrize(
    ("ids", "finish", "cut"),
    [
        (said("ok"), Finish.STOP, Cut.NO),
        (said("ok")[:-1], Finish.LENGTH, Cut.LENGTH),
        (said("ok")[:-1], Finish.STOP, Cut.NO),
    ],
)
def test_f7_the_next_prompt_closes_an_answer_exactly_once(ids: list[int], finish: Finish, cut: Cut) -> None:
    one = player()
    prompt = needed(one).prompt
    assert one.answer(sampled(ids, finish)) == Reply("ok", cut)
    one.judged(accepted=True)
    after = needed(one).prompt[len(prompt) + len(said("ok")) - 1 :]
    assert after[:2] == [END, *chat().tokenizer.encode("\n")]
    assert masked_ids(one.trajectory()) == ids


def test_g4_each_players_mask_covers_its_own_words_only() -> None:
    x, y = player(), player()
    lengths = {"x": (4, 5, 6), "y": (7, 8, 9)}
    for turn in range(3):
        for name, one, other in (("x", x, y), ("y", y, x)):
            ids = [*chat().tokenizer.encode("!" * (lengths[name][turn] - 1)), END]
            take_turn(one, ids)
            other.hear("!" * (lengths[name][turn] - 1))
    assert len(masked_ids(x.trajectory())) == 15
    assert len(masked_ids(y.trajectory())) == 24


@pytest.mark.parametrize("learns", [False, True])
def test_replies_that_did_not_parse_are_masked_unless_the_scenario_learns_from_them(learns: bool) -> None:
    one = player(learns=learns)
    take_turn(one, said("bad"), accepted=False)
    take_turn(one, said("good"), attempt=1)
    take_turn(one, said("worse"), accepted=False)
    trajectory = one.trajectory()
    assert masked_ids(trajectory) == (said("bad") + said("good") + said("worse") if learns else said("good"))
    assert (trajectory.retries, trajectory.forfeits) == (1, 1)
    assert trajectory.sampled == len(said("bad") + said("good") + said("worse"))


def test_a_reply_nobody_judged_is_not_trained_on() -> None:
    one = player(learns=True)
    needed(one)
    one.answer(sampled(said("ok")))
    assert masked_ids(one.trajectory()) == []


def test_a_missed_deadline_is_a_forfeit_and_the_game_goes_on() -> None:
    one = player()
    first = needed(one).prompt
    second = needed(one, "next").prompt
    assert second == first + chat().continuation("next", closed=False)
    one.answer(sampled(said("ok")))
    one.judged(accepted=True)
    assert one.trajectory().forfeits == 1
    needed(one)
    assert one.trajectory().forfeits == 2


def test_every_version_that_sampled_has_its_span() -> None:
    one = player()
    first = len(take_turn(one, said("a"), version=3))
    second = len(take_turn(one, said("b"), version=3))
    third = len(take_turn(one, said("c"), version=4))
    assert one.trajectory().spans == (Span(3, first, second + 2), Span(4, third, third + 2))


@pytest.mark.parametrize(("logprobs", "missing"), [([-0.1, None, -0.2], 1), ([-0.1, math.nan, -math.inf], 2), ([], 3)])
def test_h9_tokens_without_a_logprob_are_masked_and_countable(logprobs: list[float], missing: int) -> None:
    one = player()
    take_turn(one, [*chat().tokenizer.encode("!!"), END], logprobs=logprobs)
    trajectory = one.trajectory()
    assert sum(trajectory.mask) == 3 - missing
    assert np.isnan(unpack_floats(trajectory.logprobs)).sum() == missing


def test_p1_every_ask_has_a_seed_of_its_own() -> None:
    def seeds(run: int) -> list[int]:
        found = []
        for episode in range(4):
            for seat in ("left", "right"):
                playing = Playing(AgentName("x"), SeatName(seat), POLICY, 8, 1000)
                one = PolicyPlayer(chat(), playing, lambda ask, key=(run, episode, seat): derive(*key, ask))
                for attempt in range(3):
                    found.append(needed(one, attempt=attempt).sampling.seed)
                    one.answer(sampled(said("ok")))
        return found

    assert len(set(seeds(7))) == 24
    assert seeds(7) == seeds(7)
    assert not set(seeds(7)) & set(seeds(8))


def test_i4_the_budget_is_lowered_to_what_fits() -> None:
    prompt = len(chat().opening(None, "go"))
    one = player(context=prompt + 8)
    assert needed(one).sampling.max_tokens == 8
    assert one.answer(sampled([5] * 8, Finish.LENGTH)).cut is Cut.CONTEXT
    assert one.trajectory().cut == "context"


def test_i4_a_prompt_that_leaves_no_room_is_answered_without_a_request() -> None:
    prompt = len(chat().opening(None, "go"))
    one = player(context=prompt + 20)
    take_turn(one, said("ok"))
    before = one.trajectory()
    one.hear("x" * 100_000)
    assert one.ask("go", attempt=0) == Reply("", Cut.CONTEXT)
    one.judged(accepted=False)
    assert one.ask("go", attempt=0) == Reply("", Cut.CONTEXT)
    one.judged(accepted=False)
    after = one.trajectory()
    assert (after.ids, after.mask, after.cut, after.forfeits) == (before.ids, before.mask, "context", 2)


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("cut", [Cut.NO, Cut.LENGTH, Cut.CONTEXT])
def test_i2_a_cut_answer_is_remembered_with_its_limit(turns: int, cut: Cut) -> None:
    one = player()
    for _ in range(turns - 1):
        take_turn(one, said("ok"))
    finish = {Cut.NO: Finish.STOP, Cut.LENGTH: Finish.LENGTH, Cut.CONTEXT: Finish.CONTEXT}[cut]
    take_turn(one, said("ok") if cut is Cut.NO else said("ok")[:-1], finish=finish, accepted=cut is Cut.NO)
    assert one.trajectory().cut == cut


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([END], ""), ([*chat().tokenizer.encode("a" * 100_000), END], "a" * 100_000)]
)
def test_i5_empty_and_endless_answers_are_answers(ids: list[int], text: str) -> None:
    one = player(context=500_000)
    prompt = needed(one).prompt
    assert one.answer(sampled(ids)).text == text
    one.judged(accepted=True)
    assert needed(one).prompt[: len(prompt) + len(ids)] == prompt + ids
    assert masked_ids(one.trajectory()) == ids


def test_the_template_s_own_end_token_stops_the_sampler() -> None:
    template = ChatTemplate(tokenizer(byte_level_json(), chat().tokenizer.template, eos=None, extra_eos=(1,)))
    assert needed(player(template)).sampling.stop_ids == (1, END)


def test_a_seat_is_briefed_first_and_once() -> None:
    one = player()
    one.brief("a")
    with pytest.raises(ValueError, match="briefed late or twice"):
        one.brief("b")
    other = player()
    other.hear("a")
    with pytest.raises(ValueError, match="briefed late or twice"):
        other.brief("b")


def test_an_answer_of_another_policy_or_to_no_question_is_refused() -> None:
    one = player()
    with pytest.raises(ValueError, match="did not ask for"):
        one.answer(sampled([1]))
    needed(one)
    with pytest.raises(ValueError, match=r"plays x@3 but the answer is from y@3"):
        one.answer(Answer([1], [-1.0], Finish.STOP, PolicyVersion(PolicyName("y"), 3)))


REPLIES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 300), max_size=6),
        st.sampled_from(Finish),
        st.booleans(),
        st.text("ab<|im_end>\n", max_size=12),
    ),
    max_size=6,
)


@given(REPLIES, st.booleans())
def test_whatever_is_said_the_context_grows_and_the_mask_is_the_accepted_words(
    replies: list[tuple[list[int], Finish, bool, str]], learns: bool
) -> None:
    one = player(learns=learns)
    before: list[int] = []
    trained: list[int] = []
    for ids, finish, accepted, heard in replies:
        one.hear(heard)
        prompt = needed(one).prompt
        assert prompt[: len(before)] == before
        one.answer(sampled(ids, finish))
        one.judged(accepted=accepted)
        before = prompt + ids
        trained += ids if accepted or learns else []
    trajectory = one.trajectory()
    assert unpack_ids(trajectory.ids) == before
    assert masked_ids(trajectory) == trained
    assert trajectory.sampled == sum(len(ids) for ids, *_ in replies)
    assert sum(span.end - span.start for span in trajectory.spans) >= trajectory.sampled
