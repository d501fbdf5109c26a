"""Small tokenizers and chat templates for tests: the shapes found in the wild, without any download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tinker.tokens import ChatTemplate, Tokenizer
from tinker.tokens.tokenizer import Parts

CORPUS = [
    "higher or lower",
    "guess the number of your partner",
    "yes no ok 1 2 3",
    "user assistant system",
    "I have a secret",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are S.<|im_end|>\n{% endif %}" + CHATML
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS_HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
NO_SYSTEM_ROLE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
INSTRUCTION = (  # answers close with the EOS, users with plain text
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}{% endfor %}"
)
NO_END = (  # the next role's token is what ends an answer
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (  # with the tag that marks assistant text
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "drops thinking": DROPS_THINKING,
    "bos and headers": BOS_HEADERS,
    "no system role": NO_SYSTEM_ROLE,
    "instruction": INSTRUCTION,
    "marked": MARKED,
}
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")


@cache
def byte_level_json(special: bool = True, adds_bos: bool = False) -> str:
    """A byte-level BPE with a few merges; `special=False` leaves its control tokens unmarked, as careless exports do."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    if special:
        raw.add_special_tokens(list(SPECIAL))
    else:
        raw.add_tokens(list(SPECIAL))
    raw.add_tokens(["<think>", "</think>"])
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
        )
    return raw.to_str()


@cache
def metaspace_json() -> str:
    """A SentencePiece-like BPE (spaces become U+2581, one is put in front)."""
    raw = RawTokenizer(models.BPE(byte_fallback=False))
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens(list(SPECIAL))
    return raw.to_str()


def abc_json() -> str:
    """Case F1's toy: {a:0, b:1, c:2, ab:3, abc:4, bc:5}, plus what a chat needs."""
    rest = "\n :>UA"
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5} | {
        letter: 6 + at for at, letter in enumerate(rest)
    }
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c"), ("b", "c")]))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<|im_end|>"])
    return raw.to_str()


def tokenizer(
    source: str, template: str, eos: str | None = "<|im_end|>", bos: str = "<s>", extra_eos: Iterable[int] = ()
) -> Tokenizer:
    special = {"bos_token": bos} | ({"eos_token": eos} if eos else {})
    return Tokenizer(Parts(source, template, tuple(extra_eos), special))


@cache
def chat(name: str = "chatml") -> ChatTemplate:
    """One of `TEMPLATES` over the byte-level tokenizer."""
    return ChatTemplate(tokenizer(byte_level_json(), TEMPLATES[name]))


def hugging_face_files(source: str, template: str, eos: str = "<|im_end|>") -> dict[str, str]:
    """The files that save_pretrained writes, as text."""
    return {
        "tokenizer.json": source,
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
        ),
        "chat_template.jinja": template,
    }
