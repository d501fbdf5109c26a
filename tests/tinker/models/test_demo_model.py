"""The shipped demo base: what transformers loads, what our tokenizer says of it, and that it knows the rules."""

from __future__ import annotations

import random

import pytest

from bench.demo_dialogues import SOURCES, Habits, pieces
from envs import Dilemma, Game, Guess, Nim
from tinker.models import DEMO
from tinker.tokens import ChatTemplate, Tokenizer

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENIZER = Tokenizer.from_dir(DEMO)


@pytest.fixture(scope="module")
def model() -> object:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def test_the_tokenizer_of_transformers_gives_the_same_ids() -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(DEMO)
    rng = random.Random(0)
    for source in SOURCES:
        for dialogue in source(rng, Habits(skill=0.3, slips=0.2)):
            text = "".join(piece.text for piece in pieces(dialogue))
            assert theirs.encode(text, add_special_tokens=False) == TOKENIZER.encode_frame(text)


def test_it_is_as_small_as_its_card_says(model) -> None:  # type: ignore[no-untyped-def]
    assert model.num_parameters() == 848_000
    assert model.config.vocab_size == TOKENIZER.vocab == 470
    assert TOKENIZER.eos_ids == (model.config.eos_token_id,)


@pytest.mark.parametrize(
    ("game", "seat"),
    [(Guess(5), "guesser"), (Guess(5, guesses=(4,)), "hinter"), (Nim(7, "alpha"), "alpha"), (Dilemma(), "beta")],
)
def test_nearly_all_sampled_answers_are_legal(model, game: Game[object], seat: str) -> None:  # type: ignore[no-untyped-def]
    ids = ChatTemplate(TOKENIZER).opening(game.brief(seat), game.view(seat))
    torch.manual_seed(0)
    rows = torch.tensor([ids] * 100)
    sampled = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=6, do_sample=True, top_k=0, top_p=1.0
    )
    answers = [TOKENIZER.decode(row[len(ids) :]) for row in sampled.tolist()]
    assert sum(answer in game.answers(seat) for answer in answers) >= 90
