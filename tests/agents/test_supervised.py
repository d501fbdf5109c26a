"""Supervised rows: the mask lies on every answer and its end token, whatever the texts are (field cases G1, G2, G3, G5, F4, F6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.players.player import Answer, Need
from agents.players.policy import Playing, PolicyPlayer
from agents.supervised import supervised_row, supervised_rows
from tests.toy_tokens import TEMPLATES, chat
from tinker.protocol.batches import Row
from tinker.protocol.values import AgentName, Finish, PolicyName, PolicyVersion, SeatName
from tinker.tokens import ChatTemplate


def talk(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    spoken = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *spoken] if system is not None else spoken


def trained(template: ChatTemplate, row: Row) -> list[str]:
    """The runs of trained tokens, as text."""
    runs: list[list[int]] = []
    for at, on in enumerate(row.mask):
        if on and (at == 0 or not row.mask[at - 1]):
            runs.append([])
        if on:
            runs[-1].append(int(row.ids[at]))
    return [template.tokenizer.decode(run, skip_special=False) for run in runs]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_g1_g3_every_answer_is_trained_on_with_its_end_token(name: str) -> None:
    template = chat(name)
    row = supervised_row(template, talk("one", "two", "three", "four", system="S"))
    assert trained(template, row) == ["two<|im_end|>", "four<|im_end|>"]


def test_g5_identical_answers_are_both_trained_on() -> None:
    template = chat()
    assert trained(template, supervised_row(template, talk("ok", "ok", "ok", "ok"))) == ["ok<|im_end|>"] * 2


def test_an_answer_that_spells_a_control_token_is_still_one_answer() -> None:
    template = chat()
    said = "a<|im_end|>\n<|im_start|>user\nb"
    row = supervised_row(template, talk(said, said))
    assert trained(template, row) == [f"{said}<|im_end|>"]
    assert row.ids.tolist().count(template.end_id) == 2


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_training_sees_the_context_that_playing_sees(name: str) -> None:
    template = chat(name)
    playing = Playing(AgentName("x"), SeatName("s"), PolicyVersion(PolicyName("x"), 0), 64, 1000)
    one = PolicyPlayer(template, playing, lambda ask: ask)
    one.brief("S")
    for question, answer in (("one", "two"), ("three", "four")):
        assert isinstance(one.ask(question, attempt=0), Need)
        ids = template.answer(answer)
        one.answer(Answer(ids, [-1.0] * len(ids), Finish.STOP, playing.policy))
        one.judged(accepted=True)
    played = one.trajectory()
    row = supervised_row(template, talk("one", "two", "three", "four", system="S"))
    assert row.ids.astype("<i4").tobytes() == played.ids
    assert bytes(row.mask.tolist()) == played.mask


def test_weights_add_up_to_one_per_row_and_per_batch() -> None:
    chats = [talk("a", "b"), talk("a", "a longer answer", "c", "d")]
    assert supervised_row(chat(), chats[1]).weights.sum() == pytest.approx(1.0)
    rows = supervised_rows(chat(), chats)
    assert sum(row.weights.sum() for row in rows) == pytest.approx(1.0)
    assert len({float(row.weights.max()) for row in rows}) == 1


def test_g5_a_row_cap_shortens_every_array_alike() -> None:
    whole = supervised_row(chat(), talk("a", "b", "c", "a long answer"))
    row = supervised_row(chat(), talk("a", "b", "c", "a long answer"), max_row=int(whole.mask.argmax()) + 3)
    assert row.mask.sum() == 2
    assert row.ids.size == row.mask.size == row.weights.size
    assert row.weights.sum() == pytest.approx(1.0)


def test_g2_a_chat_without_anything_to_train_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="no answer within 3 tokens"):
        supervised_row(chat(), talk("a", "b"), max_row=3)


@pytest.mark.parametrize(
    "roles", [[], ["user"], ["assistant"], ["system"], ["user", "user"], ["user", "assistant", "user"]]
)
def test_other_orders_of_roles_are_refused(roles: list[str]) -> None:
    with pytest.raises(ValueError, match=r"expected \[system\?, user, assistant"):
        supervised_row(chat(), [{"role": role, "content": "a"} for role in roles])


@given(
    st.lists(st.text("ab <|im_end>\n", max_size=8), min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0)
)
def test_whatever_is_said_the_trained_text_is_the_answers(texts: list[str]) -> None:
    template = chat()
    assert trained(template, supervised_row(template, talk(*texts))) == [
        f"{answer}<|im_end|>" for answer in texts[1::2]
    ]
