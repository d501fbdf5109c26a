"""Facts about a model directory from its config.json alone, so that a wrong one is refused before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinker.tokens.errors import TokenizerError
from tinker.tokens.tokenizer import Tokenizer, read_json

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`vocab`: rows of the embedding; `context`: positions the model was made for; `architecture`: its class in transformers."""

    name: str
    vocab: int
    context: int
    architecture: str


def check_model_dir(path: str | Path) -> ModelFacts:
    """Read config.json; TokenizerError if the directory, the file or a needed entry is missing."""
    path = Path(path)
    if not path.is_dir():
        raise TokenizerError(f"no model directory at {path}; give the path of a downloaded or saved model")
    if not (path / "config.json").is_file():
        raise TokenizerError(f"{path} has no config.json; give the directory that save_pretrained(...) wrote")
    config = read_json(path / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}  # models for images and text keep the language part inside
    vocab = config.get("vocab_size", inner.get("vocab_size"))
    context = next(
        (entry[key] for key in _CONTEXT_KEYS for entry in (config, inner) if isinstance(entry.get(key), int)), None
    )
    architectures = config.get("architectures")
    if not isinstance(vocab, int):
        raise TokenizerError(f"{path / 'config.json'} has no vocab_size; give the directory of a causal language model")
    if context is None:
        raise TokenizerError(f"{path / 'config.json'} names no context length ({_CONTEXT_KEYS[0]}); add it to the file")
    if not isinstance(architectures, list) or not architectures:
        raise TokenizerError(f'{path / "config.json"} names no architecture; add it, as in ["Qwen3ForCausalLM"]')
    return ModelFacts(model_name(path), vocab, int(context), str(architectures[0]))


def model_name(path: Path) -> str:
    """What people call the model in this directory: its name, or that of the hub's repository if it lies in the hub's cache."""
    path = path.resolve()
    if path.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def check_fits(tokenizer: Tokenizer, facts: ModelFacts) -> None:
    """TokenizerError if the tokenizer may produce ids that the model has no embedding for."""
    if tokenizer.vocab > facts.vocab:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab} ids but {facts.name} has a vocab_size of {facts.vocab}; remove the added tokens, "
            "or resize the model's embeddings and save it (adapters do not carry embeddings)"
        )
    outside = [index for index in tokenizer.eos_ids if index >= facts.vocab]
    if outside:
        raise TokenizerError(
            f"end-of-sequence ids {outside} lie outside {facts.name}'s vocab_size of {facts.vocab}; fix generation_config.json"
        )
