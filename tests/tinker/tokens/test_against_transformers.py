"""The chat template against transformers' own rendering and encoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toy_tokens import TEMPLATES, byte_level_json, hugging_face_files, metaspace_json
from tinker.tokens import ChatTemplate, Tokenizer

pytestmark = pytest.mark.train
transformers = pytest.importorskip("transformers")

CHATS = [
    [("user", "higher or lower?")],
    [("system", "You guess."), ("user", "  a\n\nb  ")],
    [("user", "one"), ("assistant", "3"), ("user", "two ünï 世")],
    [("system", "S"), ("user", "one"), ("assistant", "4"), ("user", "two"), ("assistant", "5"), ("user", "")],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"instruction"}))
@pytest.mark.parametrize("source", ["bytes", "bytes and bos", "metaspace"])
def test_ids_equal_apply_chat_template(tmp_path: Path, source: str, name: str, chat: list[tuple[str, str]]) -> None:
    if name == "no system role" and chat[0][0] == "system":
        pytest.skip("that template has no system role")
    if source == "metaspace" and "世" in str(chat):
        pytest.skip("the toy alphabet is ASCII")
    text = metaspace_json() if source == "metaspace" else byte_level_json(adds_bos=source == "bytes and bos")
    for file, content in hugging_face_files(text, TEMPLATES[name]).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = ChatTemplate(Tokenizer.from_dir(tmp_path))
    system = chat[0][1] if chat[0][0] == "system" else None
    spoken = chat[1:] if system is not None else chat
    ids = ours.opening(system, spoken[0][1])
    for (_, answer), (_, user) in zip(spoken[1::2], spoken[2::2], strict=True):
        ids += [*ours.answer(answer), *ours.continuation(user, closed=True)]
    messages = [{"role": role, "content": said} for role, said in chat]
    assert ids == list(theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"])
    assert ours.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
