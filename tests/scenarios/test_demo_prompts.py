"""What a policy on a small base model reads in the shipped scenarios is what that model was trained on, token for token."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from scenario_fakes import play

from agents.players.player import Answer, Need
from agents.players.policy import Playing, PolicyPlayer
from bench import demo_dialogues
from bench.demo_dialogues import SOURCES, TABLE_SOURCES, Dialogue, Habits, Source, pieces
from bench.demo_sentences import listing
from scenarios.library import library
from tinker.models import DEMO, TABLE
from tinker.protocol.values import AgentName, Finish, PolicyName, PolicyVersion, SeatName, unpack_ids
from tinker.tokens import ChatTemplate, Tokenizer

ROOT = Path(__file__).parents[2]
POLICY = PolicyVersion(PolicyName("demo"), 0)
CHATS = {name: ChatTemplate(Tokenizer.from_dir(path)) for name, path in {"demo": DEMO, "table": TABLE}.items()}
GAMES = {
    "guess": demo_dialogues.guess,
    "nim": demo_dialogues.nim,
    "dilemma": demo_dialogues.dilemma,
    "kuhn": demo_dialogues.poker,
    "auction": demo_dialogues.auction,
    "negotiate": demo_dialogues.negotiate,
    "relay": demo_dialogues.relay,
}


def dialogues(source: Source) -> list[Dialogue]:
    """Enough of the training data of one game to hold every prompt of the game."""
    rng = random.Random(0)
    return [dialogue for _ in range(3000) for dialogue in source(rng, Habits(skill=0.3))]


def chat(name: str) -> ChatTemplate:
    return CHATS[library()[name].defaults.get("model", "demo")]


class Saying:
    """Turns that answer with random legal answers of the demo model's vocabulary."""

    def __init__(self, chat: ChatTemplate, answers: Mapping[str, list[str]], rng: random.Random) -> None:
        self._chat = chat
        self._answers = answers
        self._rng = rng

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer]:
        said = {seat: self._chat.answer(self._rng.choice(self._answers[seat])) for seat in needs}
        return {seat: Answer(ids, [0.0] * len(ids), Finish.STOP, POLICY) for seat, ids in said.items()}


@pytest.mark.parametrize("name", GAMES)
async def test_contexts_in_play_are_dialogues_of_the_training_data(name: str) -> None:
    known = dialogues(GAMES[name])
    briefs = {(dialogue.seat, dialogue.brief) for dialogue in known}
    prompts = {(dialogue.seat, said.prompt) for dialogue in known for said in dialogue.exchanges}
    answers = {
        seat: sorted({said.answer for d in known if d.seat == seat for said in d.exchanges}) for seat, _ in briefs
    }
    played = library()[name]
    for seed in range(30):
        players = {seat: policy_player(chat(name), seat) for seat in map(SeatName, played.seats)}
        episode = await play(played, players, Saying(chat(name), answers, random.Random(seed)), seed=seed)  # type: ignore[arg-type]
        for line in episode.recording.lines:
            assert line.kind != "brief" or (line.seat, line.text) in briefs
            assert line.kind != "ask" or (line.seat, line.text) in prompts


def policy_player(template: ChatTemplate, seat: SeatName) -> PolicyPlayer:
    return PolicyPlayer(template, Playing(AgentName(seat), seat, POLICY, max_tokens=6, context=1024), lambda ask: ask)


@pytest.mark.parametrize("name", GAMES)
def test_a_policys_context_has_the_token_ids_of_the_training_dialogue(name: str) -> None:
    template = chat(name)
    for dialogue in dialogues(GAMES[name])[:50]:
        player = policy_player(template, SeatName(dialogue.seat))
        player.brief(dialogue.brief)
        for said in dialogue.exchanges:
            assert isinstance(player.ask(said.prompt, attempt=0), Need)
            ids = template.answer(said.answer)
            player.answer(Answer(ids, [0.0] * len(ids), Finish.STOP, POLICY))
        text = "".join(piece.text for piece in pieces(dialogue)).removesuffix("\n")
        assert unpack_ids(player.trajectory().ids) == template.tokenizer.encode_frame(text)


@pytest.mark.parametrize("name", GAMES)
def test_every_legal_answer_fits_into_the_replies_of_the_defaults(name: str) -> None:
    limit = library()[name].defaults["learning"]["max_tokens"]
    answers = {said.answer for dialogue in dialogues(GAMES[name]) for said in dialogue.exchanges}
    assert max(len(chat(name).answer(answer)) for answer in answers) <= limit


@pytest.mark.parametrize(
    ("page", "sources"),
    [(DEMO / "README.md", SOURCES), (ROOT / "docs" / "scenarios.md", SOURCES), (TABLE / "README.md", TABLE_SOURCES)],
    ids=["demo's card", "docs", "table's card"],
)
def test_every_sentence_that_a_model_knows_is_listed_and_no_other(page: Path, sources: tuple[Source, ...]) -> None:
    assert page.read_text(encoding="utf-8").count(f"```text\n{listing(sources)}```\n") == 1


def test_the_template_adds_no_default_system_message() -> None:
    template = CHATS["demo"]
    assert template.tokenizer.decode(template.opening(None, "hello"), skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
