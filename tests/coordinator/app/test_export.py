"""Exported agents, read by PEFT and transformers: they say what the engine says of the version."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from coordinator.app.config import ConfigError
from coordinator.app.export import export
from coordinator.app.rundir import RunDirectoryError
from tinker.engines.engine import Files
from tinker.models import DEMO
from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, LoraSpec, LossSpec, PolicyName, PolicyVersion

pytestmark = [
    pytest.mark.train,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # of peft on transformers
]
IDS = [5, 9, 30, 7, 12, 40, 8]


def row(ids: list[int]) -> Row:
    mask = np.arange(len(ids)) > 2
    column = mask.astype(np.float32)
    return Row(np.array(ids, np.int32), mask, -column, column, column)


async def trained() -> tuple[Files, Files, list[float]]:
    """Two versions of a policy on the demo model, and the logprobs of `IDS` under the second."""
    pytest.importorskip("torch")
    from tinker.engines.torch import TorchEngine

    ann = PolicyName("ann")
    async with TorchEngine(str(DEMO), threads=1) as engine:
        await engine.attach(ann, LoraSpec(rank=4, targets=("q_proj", "v_proj", "down_proj")))
        versions = []
        for lr in (1e-2, 3e-2):
            await engine.forward_backward(ann, [row(IDS)], LossSpec("importance_sampling"))
            await engine.optim_step(ann, AdamSpec(lr))
            versions.append(await engine.publish(ann))
        second = PolicyVersion(ann, 2)
        await engine.load(second, versions[1])
        (scored,) = await engine.score(second, [row(IDS)])
    return versions[0], versions[1], scored


@pytest.fixture
async def run(tmp_path: Path) -> tuple[Path, list[float]]:
    first, second, scored = await trained()
    for number, files in ((1, first), (2, second)):
        home = tmp_path / "run/adapters/ann" / f"v{number:06d}"
        home.mkdir(parents=True)
        for name, data in files.items():
            (home / name).write_bytes(data)
    (tmp_path / "run/config.toml").write_text('model = "demo"\n')
    return tmp_path / "run", scored


def logprobs(model: object) -> list[float]:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].float()  # type: ignore[operator]
    values = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
    return [0.0, *values.tolist()]


async def test_an_exported_adapter_is_loaded_by_peft_and_says_the_same(run: tuple[Path, list[float]]) -> None:
    peft = pytest.importorskip("peft")
    place, scored = run
    target = export(place, "ann", None, None, "", merge=False)
    assert target == place / "export/ann-v000002"
    assert Path(json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]) == DEMO.resolve()
    assert logprobs(peft.AutoPeftModelForCausalLM.from_pretrained(target)) == pytest.approx(scored, abs=1e-4)


async def test_a_merged_model_is_loaded_by_transformers_and_is_what_peft_merges(
    run: tuple[Path, list[float]], tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    place, scored = run
    target = export(place, "ann", tmp_path / "merged", None, "", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert logprobs(merged) == pytest.approx(scored, abs=1e-4)
    adapter = export(place, "ann", tmp_path / "adapter", None, "", merge=False)
    expected = peft.AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == expected.keys()
    assert all(bool((found[name] - expected[name]).abs().max() < 1e-6) for name in expected)
    transformers.AutoTokenizer.from_pretrained(target)


async def test_an_older_version_can_be_chosen(run: tuple[Path, list[float]]) -> None:
    place, _ = run
    target = export(place, "ann", None, 1, "", merge=False)
    weights = "adapter_model.safetensors"
    assert (target / weights).read_bytes() == (place / "adapters/ann/v000001" / weights).read_bytes()


async def test_what_is_not_there_or_does_not_fit_is_refused_and_leaves_nothing(
    run: tuple[Path, list[float]], tmp_path: Path
) -> None:
    place, _ = run
    with pytest.raises(RunDirectoryError, match="has no agent 'bob'; it has ann"):
        export(place, "bob", None, None, "", merge=False)
    with pytest.raises(RunDirectoryError, match="ann has no version 7; it has 1, 2"):
        export(place, "ann", None, 7, "", merge=False)
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(RunDirectoryError, match="is there already"):
        export(place, "ann", taken, None, "", merge=True)
    other = tmp_path / "other"
    shutil.copytree(DEMO, other)
    import torch
    from safetensors.torch import load_file, save_file

    name = "model.safetensors"
    save_file({key: torch.zeros(3, 3) for key in load_file(other / name)}, other / name)
    with pytest.raises(ConfigError, match="another one's"):
        export(place, "ann", tmp_path / "new", None, str(other), merge=True)
    assert {each.name for each in os.scandir(tmp_path)} == {"run", "taken", "other"}
