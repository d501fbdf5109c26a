"""Make a small base model: a tiny language model that knows the rules of a few text games and plays them badly.

    python -m bench.make_demo_model --out DIR [--games demo|table] [--steps N] [--seed S]

The players whose transcripts it reads are perfect for 60 % of the steps, so that the model forms what good play needs
(comparing two digits, say); then their skill falls to 0.3, which leaves it the rules and a weak preference. What is missing
is left to reward. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench.demo_dialogues import END, SOURCES, START, TABLE_SOURCES, Dialogue, Habits, Source, pieces

PAD = "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTEXT = 1024
BATCH = 64
PEAK_LR = 3e-3
HELD = 0.6  # the part of the training with perfect players
LAST_SKILL = 0.3
SLIP_RATE = 0.03
GAMES = {"demo": SOURCES, "table": TABLE_SOURCES}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--games", choices=GAMES, default="demo")
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    rng = random.Random(asked.seed)
    sources = GAMES[asked.games]
    tokenizer = make_tokenizer(rng, sources)
    model = make_model(len(tokenizer), asked.seed)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    train(model, tokenizer, rng, sources, asked.steps)
    model.save_pretrained(asked.out)
    tokenizer.save_pretrained(asked.out)
    (asked.out / "model.safetensors").chmod(0o644)
    settings = asked.out / "tokenizer_config.json"  # names a class that only one major version of transformers knows
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def make_tokenizer(rng: random.Random, sources: Sequence[Source]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the games' sentences, with every digit a token of its own."""
    corpus = []
    for source in sources:
        for _ in range(60):
            for dialogue in source(rng, Habits(skill=0.3, slips=0.1)):
                corpus.append(f"system\n{dialogue.brief}")
                corpus += [f"user\n{said.prompt}" for said in dialogue.exchanges]
                corpus += [f"assistant\n{said.answer}" for said in dialogue.exchanges]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=511, show_progress=False, special_tokens=[PAD, START, END], initial_alphabet=alphabet
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def make_model(vocab: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    sources: Sequence[Source],
    steps: int,
) -> None:
    """Next-token prediction on fresh transcripts; the skill of their players follows the step."""

    @lru_cache(maxsize=100_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def row(dialogue: Dialogue) -> tuple[list[int], list[float]]:
        parts = [(encode(piece.text), piece.weight) for piece in pieces(dialogue)]
        return [index for ids, _ in parts for index in ids], [weight for ids, weight in parts for _ in ids]

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.98))
    model.train()
    began = time.perf_counter()
    for step in range(steps):
        done = step / steps
        habits = Habits(skill_at(done), SLIP_RATE)
        ids, weights = padded([row(rng.choice(sources[i % len(sources)](rng, habits))) for i in range(BATCH)])
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 20) * (0.1 + 0.9 * (1 - done))
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(
            ids[:, 1:]
        )
        loss = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"step {step}  skill {habits.skill:.2f}  loss {loss.item():.3f}  {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    model.eval()


def skill_at(done: float) -> float:
    """1 until `HELD` of the training is done, then falling to `LAST_SKILL`, where the last tenth stays."""
    return 1.0 - (1.0 - LAST_SKILL) * min(1.0, max(0.0, done - HELD) / (0.75 * (1 - HELD)))


def padded(rows: list[tuple[list[int], list[float]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids and of their weights, filled up on the right (with weight 0)."""
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    weights_BT = torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows])
    return ids_BT, weights_BT


if __name__ == "__main__":
    main()
