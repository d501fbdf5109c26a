"""The tokenizer: what was said stays text, the bundle is the tokenizer, broken directories are named."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy_tokens import CHATML, abc_json, byte_level_json, hugging_face_files, metaspace_json, tokenizer
from tinker.protocol.to_coordinator import Hello
from tinker.protocol.to_host import Admitted
from tinker.protocol.values import ModelCard, PeerName, Role, RunId
from tinker.runtime.codec import MAX_FRAME, decode, encode
from tinker.tokens import Tokenizer, TokenizerError, check_fits, check_model_dir
from tinker.tokens.tokenizer import MAX_BUNDLE

CONFIG = {"vocab_size": 400, "max_position_embeddings": 512, "architectures": ["Qwen3ForCausalLM"], "eos_token_id": 3}


def write(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("special", [True, False])
def test_the_text_of_a_control_token_is_not_that_token_when_somebody_says_it(special: bool) -> None:
    made = tokenizer(byte_level_json(special=special), CHATML)
    said = "bye<|im_end|>"
    assert not set(made.encode(said)) & set(made.eos_ids)
    assert made.decode(made.encode(said)) == said
    assert made.encode_frame(said)[-1] in made.eos_ids


def test_a_reasoning_tag_is_a_token_for_everybody() -> None:
    made = tokenizer(byte_level_json(), CHATML)
    assert len(made.encode("<think>")) == 1


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    made = tokenizer(byte_level_json(), CHATML)
    assert made.decode(made.encode(text)) == text


@given(
    st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "|>", "<|im_start|>", "a", "<s>", " "]), max_size=8)
)
def test_no_mix_of_token_pieces_becomes_a_control_token(pieces: list[str]) -> None:
    for special in (True, False):
        made = tokenizer(byte_level_json(special=special), CHATML)
        ids = made.encode("".join(pieces), never=made.added_ids(range(made.vocab)))
        assert not set(ids) & made.added_ids(range(made.vocab))
        assert made.decode(ids, skip_special=False) == "".join(pieces)


def test_nothing_is_added_to_a_text_by_a_tokenizer_that_adds_a_bos() -> None:
    made = tokenizer(byte_level_json(adds_bos=True), CHATML)
    assert made.encode("ok") == tokenizer(byte_level_json(), CHATML).encode("ok")


def test_saved_truncation_and_padding_do_not_change_a_prompt() -> None:
    value = json.loads(byte_level_json())
    value["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    value["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    assert tokenizer(json.dumps(value), CHATML).encode("abcdefghijkl") == tokenizer(byte_level_json(), CHATML).encode(
        "abcdefghijkl"
    )


def test_decoding_leaves_out_control_tokens_and_unknown_ids() -> None:
    made = tokenizer(byte_level_json(special=False), CHATML)
    ids = [*made.encode("ok"), made.eos_ids[0], made.vocab + 100]
    assert made.decode(ids) == "ok"
    assert made.decode(ids, skip_special=False) == "ok<|im_end|>"


def test_a_bundle_holds_the_whole_tokenizer() -> None:
    made = tokenizer(metaspace_json(), CHATML, extra_eos=(7,))
    again = Tokenizer.from_bundle(made.bundle())
    assert again.digest == made.digest
    assert (again.vocab, again.eos_ids, again.template, again.special) == (
        made.vocab,
        made.eos_ids,
        made.template,
        made.special,
    )
    assert again.encode("higher or lower") == made.encode("higher or lower")
    assert again.bundle() == made.bundle()


def test_a_tokenizer_of_20_mb_fits_into_the_messages_that_carry_it() -> None:
    template = CHATML + random.Random(0).randbytes(10_000_000).hex()
    bundle = tokenizer(byte_level_json(), template).bundle()
    hello = Hello(Role.TASKSERVER, PeerName("server"), "here", 1, tokenizer=bundle)
    admitted = Admitted(RunId("run"), ModelCard("m", "", "", 1, 1, ()), bundle, "", "here")
    assert decode(encode(hello), Hello) == hello
    assert decode(encode(admitted), Admitted) == admitted
    assert MAX_BUNDLE + 1024 * 1024 <= MAX_FRAME


def test_a_tokenizer_that_is_too_large_for_them_is_refused_when_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker.tokens.tokenizer.MAX_BUNDLE", 100)
    with pytest.raises(TokenizerError, match=r"tokenizer bundle has .* bytes, more than 100; use a smaller"):
        tokenizer(byte_level_json(), CHATML).bundle()


def test_tokenizers_that_differ_have_different_digests() -> None:
    made = [
        tokenizer(byte_level_json(), CHATML),
        tokenizer(byte_level_json(), CHATML + " "),
        tokenizer(byte_level_json(), CHATML, extra_eos=(7,)),
    ]
    assert len({one.digest for one in made}) == 3


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", zlib.compress(b"[]"), zlib.compress(b'{"format": 1}'), zlib.compress(b"{}" * 10)]
)
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(TokenizerError, match="not a tokenizer bundle"):
        Tokenizer.from_bundle(data)


def test_a_bundle_of_another_format_says_to_update() -> None:
    with pytest.raises(TokenizerError, match="format 9, expected 1"):
        Tokenizer.from_bundle(zlib.compress(b'{"format": 9}'))


def test_a_directory_is_read_with_all_end_ids(tmp_path: Path) -> None:
    files = hugging_face_files(byte_level_json(), CHATML) | {
        "generation_config.json": json.dumps({"eos_token_id": [5, 6]}),
        "config.json": json.dumps(CONFIG),
    }
    made = Tokenizer.from_dir(write(tmp_path, files))
    named = made.encode_frame("<|im_end|>")[0]
    assert made.eos_ids == tuple(sorted({3, 5, 6, named}))
    assert made.template == CHATML


@pytest.mark.parametrize(
    "value", [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_a_template_inside_the_tokenizer_config_is_found(tmp_path: Path, value: object) -> None:
    config = {"chat_template": value, "eos_token": {"content": "<|im_end|>"}}
    write(tmp_path, {"tokenizer.json": byte_level_json(), "tokenizer_config.json": json.dumps(config)})
    made = Tokenizer.from_dir(tmp_path)
    assert made.template == CHATML
    assert made.special["eos_token"] == "<|im_end|>"


def test_a_directory_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_directory_and_broken_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no model directory"):
        Tokenizer.from_dir(tmp_path / "absent")
    write(tmp_path, {"tokenizer.json": abc_json(), "tokenizer_config.json": "{"})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_dir(tmp_path)
    write(tmp_path, {"tokenizer.json": "{}", "tokenizer_config.json": "{}"})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_dir(tmp_path)


def test_the_facts_of_a_model_come_from_its_config_alone(tmp_path: Path) -> None:
    facts = check_model_dir(write(tmp_path, {"config.json": json.dumps(CONFIG)}))
    assert (facts.vocab, facts.context, facts.architecture, facts.name) == (400, 512, "Qwen3ForCausalLM", tmp_path.name)
    nested = {"architectures": ["M"], "text_config": {"vocab_size": 9, "max_position_embeddings": 8}}
    assert check_model_dir(write(tmp_path, {"config.json": json.dumps(nested)})).vocab == 9


@pytest.mark.parametrize("missing", ["vocab_size", "max_position_embeddings", "architectures"])
def test_a_config_without_a_needed_entry_is_refused(tmp_path: Path, missing: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    with pytest.raises(TokenizerError, match=r"config\.json"):
        check_model_dir(write(tmp_path, {"config.json": json.dumps(config)}))


def test_j2_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    made = tokenizer(byte_level_json(), CHATML)
    facts = check_model_dir(write(tmp_path, {"config.json": json.dumps(CONFIG | {"vocab_size": 256})}))
    with pytest.raises(TokenizerError, match=rf"{made.vocab} ids .* vocab_size of 256"):
        check_fits(made, facts)
    check_fits(made, check_model_dir(write(tmp_path, {"config.json": json.dumps(CONFIG | {"vocab_size": made.vocab})})))
