"""A tokenizer that travels: everything needed to encode, decode and render chats, as one value that fits in a message.

Two ways to encode, because two kinds of text exist. `encode_frame` is for text that we wrote (a rendered chat template): the text of a
special token becomes that token. `encode` is for text that somebody said: it never yields a control token, so a player who says
"<|im_end|>" has said ten characters and has not ended anything. Neither adds a begin- or end-of-sequence token of its own.

Not thread-safe: one tokenizer belongs to one event loop.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from tinker.tokens.errors import TokenizerError

MAX_BUNDLE = (
    15 * 2**20
)  # bytes on the wire, in one control message; the largest public tokenizers (256k entries) need 8 MiB
MAX_UNPACKED = 256 * 2**20
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Parts:
    """What a tokenizer is made of. `special` maps a role (`bos_token`, ...) to its text; `template` is the jinja source, "" for none."""

    tokenizer_json: str
    template: str
    eos_ids: tuple[int, ...]
    special: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """See the module. `vocab` is the number of ids it may produce (largest id + 1); `digest` names its exact content."""

    def __init__(self, parts: Parts) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(parts.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"tokenizer.json cannot be read ({error}); save the tokenizer again as a fast tokenizer"
            ) from error
        self._tokenizer.no_truncation()  # a saved truncation or padding setting would silently change every prompt
        self._tokenizer.no_padding()
        self._added: dict[int, str] = {}
        special: set[int] = set()
        for index, token in self._tokenizer.get_added_tokens_decoder().items():
            self._added[index] = token.content
            if token.special:
                special.add(index)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(vocabulary.values(), default=-1) + 1
        self.eos_ids = tuple(sorted(set(parts.eos_ids) | _named_ids(parts.special, vocabulary, "eos_token")))
        self.control_ids = frozenset(special | set(self.eos_ids))
        self.special = dict(parts.special)
        self.template = parts.template
        self._canonical = _canonical(parts, self.eos_ids)
        self.digest = hashlib.sha256(self._canonical).hexdigest()

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read a Hugging Face model directory (tokenizer.json and what lies beside it)."""
        return cls(_read_parts(Path(path)))

    @classmethod
    def from_bundle(cls, data: bytes) -> Tokenizer:
        """The inverse of `bundle`; TokenizerError for anything else, however large it would become."""
        return cls(_unpack(data))

    def bundle(self) -> bytes:
        """Everything this tokenizer is made of, compressed; at most `MAX_BUNDLE` bytes."""
        data = zlib.compress(self._canonical)
        if len(data) > MAX_BUNDLE:
            raise TokenizerError(
                f"tokenizer bundle has {len(data):,} bytes, more than {MAX_BUNDLE:,}; use a smaller tokenizer.json"
            )
        return data

    def encode(self, text: str, *, never: Collection[int] = ()) -> list[int]:
        """Ids of something said: contains no id of `control_ids`, nor of `never`, whatever the text is."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self._without(text, self.control_ids.union(never))
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_frame(self, text: str) -> list[int]:
        """Ids of a rendered template: text of special tokens becomes special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text; without control tokens unless they are asked for. Ids that the tokenizer does not know have no text."""
        kept = [index for index in ids if index not in self.control_ids] if skip_special else list(ids)
        text: str = self._tokenizer.decode(kept, skip_special_tokens=skip_special)
        return text

    def added_ids(self, ids: Sequence[int]) -> frozenset[int]:
        """Those of `ids` that are added tokens (special or not): the ones a template uses as its frame."""
        return frozenset(index for index in ids if index in self._added)

    def _without(self, text: str, forbidden: Collection[int]) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not any(index in forbidden for index in ids):
            return ids
        for index in forbidden:  # an added token that is not marked special still matches: take its text apart
            literal = self._added.get(index, "")
            before, found, after = text.partition(literal) if len(literal) > 1 else (text, "", "")
            if found:
                return self._without(before + found[0], forbidden) + self._without(found[1:] + after, forbidden)
        return [index for index in ids if index not in forbidden]


def _named_ids(special: Mapping[str, str], vocabulary: Mapping[str, int], name: str) -> set[int]:
    text = special.get(name, "")
    return {vocabulary[text]} if text in vocabulary else set()


def _canonical(parts: Parts, eos_ids: tuple[int, ...]) -> bytes:
    value = {
        "format": _FORMAT,
        "tokenizer_json": parts.tokenizer_json,
        "template": parts.template,
        "eos_ids": list(eos_ids),
        "special": dict(parts.special),
    }
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode()


def _unpack(data: bytes) -> Parts:
    if len(data) > MAX_BUNDLE:
        raise TokenizerError(f"tokenizer bundle has {len(data):,} bytes, at most {MAX_BUNDLE:,} are accepted")
    try:
        raw = zlib.decompressobj().decompress(data, MAX_UNPACKED)
        value = json.loads(raw)
        if value["format"] != _FORMAT:
            raise TokenizerError(
                f"tokenizer bundle has format {value['format']}, expected {_FORMAT}; update the older side"
            )
        special = {str(name): str(text) for name, text in value["special"].items()}
        eos_ids = tuple(int(index) for index in value["eos_ids"])
        return Parts(str(value["tokenizer_json"]), str(value["template"]), eos_ids, special)
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"not a tokenizer bundle ({type(error).__name__}: {error}); send what Tokenizer.bundle() returned"
        ) from error


def _read_parts(path: Path) -> Parts:
    if not path.is_dir():
        raise TokenizerError(f"no model directory at {path}; give the path of a downloaded or saved model")
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{path} has no tokenizer.json; save the tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes one for every fast tokenizer"
        )
    config = read_json(path / "tokenizer_config.json")
    eos = _eos_ids(read_json(path / "generation_config.json")) | _eos_ids(read_json(path / "config.json"))
    return Parts(file.read_text(encoding="utf-8"), _template(path, config), tuple(sorted(eos)), _special(config))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, {} if there is no file; TokenizerError if it holds something else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON ({error}); copy the model again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds a {type(value).__name__}, expected a JSON object; copy the model again")
    return value


def _eos_ids(config: Mapping[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return {index for index in values if isinstance(index, int)}


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template(path: Path, config: Mapping[str, Any]) -> str:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template", "")
    if isinstance(value, list):  # several named templates
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get(
            "default", ""
        )
    return value if isinstance(value, str) else ""
