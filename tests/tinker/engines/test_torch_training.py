# ruff: noqa: E402
"""Updates: exact gradients whatever the cut, policies that never touch one another, and nothing moving without a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore::FutureWarning")]
torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.tinker.engines import torch_oracles as oracle
from tests.tinker.engines.conformance import ADAM, ANN, BOB, LOSS, request, row, version
from tinker.engines.engine import EngineError, Files
from tinker.engines.torch import TorchEngine
from tinker.protocol.batches import Row
from tinker.protocol.values import BASE, AdamSpec, LoraSpec, LossSpec, PolicyName

Tiny = Callable[[str], Path]


def batch(seed: int = 0, rows: int = 9, *, heat: float = 1.0) -> list[Row]:
    """Random rows of different lengths; advantages of both signs, old logprobs near those of a random model."""
    noise = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        ids = noise.integers(3, 61, 4 + (5 * number) % 17)
        one = row(ids, 3, weight=1.0 / (3 * rows), temperature=heat)
        one.advantages[one.mask] = noise.normal(size=3)
        one.logprobs[one.mask] = noise.normal(-4.0, 0.1, size=3)
        made.append(one)
    return made


async def published(engine: TorchEngine, policy: PolicyName) -> dict[str, bytes]:
    return dict(await engine.publish(policy))


def assert_close(one: Files, other: Files, tolerance: float) -> None:
    for kind in ("lora_A", "lora_B"):
        for name, values in oracle.matrices(one, kind).items():
            np.testing.assert_allclose(values, oracle.matrices(other, kind)[name], atol=tolerance, rtol=0, err_msg=name)


def reference_loss(model: Any, rows: Sequence[Row], spec: LossSpec) -> Any:
    """The loss of the whole batch by its formula, one row at a time, on PEFT's model."""
    total = torch.zeros(())
    for one in rows:
        logits = model(input_ids=torch.from_numpy(one.ids[None].astype(np.int64))).logits[0] / one.temperature
        everywhere = torch.log_softmax(logits, -1)
        with model.disable_adapter(), torch.no_grad():
            bare = torch.log_softmax(
                model(input_ids=torch.from_numpy(one.ids[None].astype(np.int64))).logits[0] / one.temperature, -1
            )
        for t in np.flatnonzero(one.mask):
            now = everywhere[t - 1]
            new, advantage, weight = now[one.ids[t]], float(one.advantages[t]), float(one.weights[t])
            ratio = torch.exp(new - float(one.logprobs[t]))
            if spec.name == "cross_entropy":
                term = -new
            elif spec.name == "ppo":
                term = -torch.min(
                    ratio * advantage, torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high) * advantage
                )
            else:
                term = -ratio * advantage
            entropy = -(now.exp() * now).sum()
            kl = (now.exp() * (now - bare[t - 1])).sum()
            total = total + weight * (term - spec.entropy * entropy + spec.kl * kl)
    return total


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec("importance_sampling"),
        LossSpec("ppo", clip_low=0.1, clip_high=0.3),
        LossSpec("cross_entropy"),
        LossSpec("importance_sampling", entropy=0.05, kl=0.1),
    ],
    ids=["importance sampling", "ppo", "cross entropy", "entropy and kl"],
)
async def test_three_updates_equal_those_of_peft_and_torch(spec: LossSpec, tiny: Tiny, tmp_path: Path) -> None:
    heat = 1.0 if spec.name == "cross_entropy" else 0.8
    adam = AdamSpec(lr=3e-3, beta1=0.8, beta2=0.95, weight_decay=0.1, clip=0.05)
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        start = await engine.attach(ANN, LoraSpec(rank=3, alpha=9.0, seed=4))
        model = oracle.with_adapter(tiny("qwen3"), start, tmp_path / "start", trainable=True)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1)
        for turn in range(3):
            rows = batch(turn, heat=heat)
            measured = await engine.forward_backward(ANN, rows, spec)
            stepped = await engine.optim_step(ANN, adam)
            optimizer.zero_grad()
            loss = reference_loss(model, rows, spec)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.05)
            optimizer.step()
            assert measured["loss"] == pytest.approx(loss.item(), abs=1e-4)
            assert stepped["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
            assert stepped["grad_norm"] > adam.clip
        ours = {
            **oracle.matrices(await published(engine, ANN), "lora_A"),
            **oracle.matrices(await published(engine, ANN)),
        }
    assert len(ours) == len(trained)
    for name, value in ours.items():
        theirs = trained[name.replace(".weight", ".default.weight")].detach().numpy()
        np.testing.assert_allclose(value, theirs, atol=1e-5, rtol=0, err_msg=name)


async def test_the_cut_into_micro_batches_and_calls_changes_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for padded, parts in ((8192, 1), (40, 1), (1, 1), (8192, 3)):
        async with TorchEngine(str(tiny("qwen3")), padded_tokens=padded) as engine:
            await engine.attach(ANN, LoraSpec(seed=1))
            for turn in range(2):
                rows = batch(turn)
                for part in range(parts):
                    await engine.forward_backward(ANN, rows[part::parts], LossSpec("ppo", entropy=0.01, kl=0.01))
                await engine.optim_step(ANN, ADAM)
            results.append(await published(engine, ANN))
    for other in results[1:]:
        assert_close(results[0], other, 1e-5)


async def test_a_token_mean_is_the_mean_over_tokens_for_every_cut(tiny: Tiny) -> None:
    """Rows of 1 and 3 trained tokens: the loss is the sum over all four, each a quarter."""
    rows = [row([5, 6], 1, weight=0.25), row([5, 6, 7, 8], 3, weight=0.25)]
    for padded in (8192, 1):
        async with TorchEngine(str(tiny("qwen3")), padded_tokens=padded) as engine:
            await engine.attach(ANN, LoraSpec())
            scored = await engine.score(BASE, rows)
            measured = await engine.forward_backward(ANN, rows, LossSpec("cross_entropy"))
            assert measured["loss"] == pytest.approx(-np.mean([scored[0][1], *scored[1][1:]]), abs=1e-5)


async def test_interleaved_policies_train_as_if_alone(tiny: Tiny) -> None:
    """backward(ann), backward(bob), step(ann): bob is untouched and keeps its gradient; his own step is what it would have been alone."""
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(ANN, LoraSpec(seed=1))
        start = dict(await engine.attach(BOB, LoraSpec(seed=2, rank=3)))
        await engine.forward_backward(ANN, batch(1), LOSS)
        await engine.forward_backward(BOB, batch(2), LOSS)
        ann = await engine.optim_step(ANN, ADAM)
        assert await published(engine, BOB) == start
        bob = await engine.optim_step(BOB, ADAM)
        together = await published(engine, BOB)
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(BOB, LoraSpec(seed=2, rank=3))
        await engine.forward_backward(BOB, batch(2), LOSS)
        assert await engine.optim_step(BOB, ADAM) == bob
        assert await published(engine, BOB) == together
    assert ann["grad_norm"] != bob["grad_norm"]


async def test_every_policy_learns_in_its_own_turn_and_rests_in_the_others(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        names = {ANN: BOB, BOB: ANN}
        for name in names:
            await engine.attach(name, LoraSpec(seed=3))
        for turn, name in enumerate((ANN, BOB, ANN, BOB)):
            own, others = await published(engine, name), await published(engine, names[name])
            await engine.forward_backward(name, batch(turn), LOSS)
            await engine.optim_step(name, ADAM)
            assert await published(engine, names[name]) == others
            after = oracle.matrices(await published(engine, name))
            assert all((after[key] != before).any() for key, before in oracle.matrices(own).items())


@pytest.mark.parametrize("order", ["ftg", "fgt", "tfg", "tgf", "gft", "gtf"])
async def test_served_versions_stay_frozen_in_whatever_order_policies_come(order: str, tiny: Tiny) -> None:
    """f and g are loaded, t is attached: one update moves t alone, and what f and g answer."""
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        frozen = {
            name: oracle.noisy(await engine.attach(PolicyName(name), LoraSpec()), seed)
            for seed, name in enumerate("fg")
        }
        for name in "fg":
            await engine.detach(PolicyName(name))
        for name in order:
            if name == "t":
                start = await engine.attach(PolicyName("t"), LoraSpec(seed=9))
            else:
                await engine.load(version(name), frozen[name])
        rows = [row([5, 6, 7, 8], 2)]
        before = [await engine.score(version(name), rows) for name in "fg"]
        await engine.forward_backward(PolicyName("t"), batch(), LOSS)
        await engine.optim_step(PolicyName("t"), ADAM)
        assert [await engine.score(version(name), rows) for name in "fg"] == before
        assert await published(engine, PolicyName("t")) != dict(start)
        for name in "fg":
            with pytest.raises(EngineError, match="not attached"):
                await engine.optim_step(PolicyName(name), ADAM)


async def test_a_policy_without_rows_keeps_its_bytes_while_another_trains(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        for name in (ANN, BOB):
            await engine.attach(name, LoraSpec(seed=3))
            await engine.forward_backward(name, batch(), LOSS)
            await engine.optim_step(name, ADAM)  # both have momentum now
        resting = await published(engine, BOB)
        await engine.forward_backward(BOB, [], LOSS)
        await engine.forward_backward(ANN, batch(), LOSS)
        for name in (ANN, BOB):
            await engine.optim_step(name, ADAM)
        assert await published(engine, BOB) == resting


async def test_default_numbers_make_the_rewarded_answer_likelier(tiny: Tiny) -> None:
    """Rewards [1, 0, 1, 0] for four answers: after three updates B is not zero and the rewarded answers gained against the others."""
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.load(version("ann"), await engine.attach(ANN, LoraSpec()))
        answers = [
            await engine.generate(request([5, 6, 7], version("ann"), seed=seed, max_tokens=3)) for seed in range(4)
        ]
        rows = []
        for answer, advantage in zip(answers, (1.0, -1.0, 1.0, -1.0), strict=True):
            one = row([5, 6, 7, *answer.ids], len(answer.ids), advantage=advantage, weight=0.25)
            one.logprobs[one.mask] = answer.logprobs
            rows.append(one)
        for _ in range(3):
            await engine.forward_backward(ANN, rows, LossSpec("importance_sampling"))
            await engine.optim_step(ANN, AdamSpec(lr=2e-3))
        files = await published(engine, ANN)
        await engine.load(version("ann", 1), files)
        gains = [
            sum(after) - sum(before)
            for before, after in zip(*[await engine.score(version("ann", n), rows) for n in (0, 1)], strict=True)
        ]
    assert all(abs(values).max() > 0 for values in oracle.matrices(files).values())
    assert min(gains[0], gains[2]) > max(gains[1], gains[3])
    assert gains[0] > 0 and gains[2] > 0


async def test_what_was_sampled_has_ratio_one_at_its_own_temperature(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.load(version("ann"), await engine.attach(ANN, LoraSpec()))
        for heat in (0.5, 1.0, 1.3):
            answer = await engine.generate(request([5, 6, 7], version("ann"), temperature=heat, max_tokens=8, seed=3))
            one = row([5, 6, 7, *answer.ids], len(answer.ids), temperature=heat)
            one.logprobs[one.mask] = answer.logprobs
            measured = await engine.forward_backward(ANN, [one], LOSS)
            assert measured["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
            assert measured["logprob_gap_max"] < 1e-4


async def test_supervised_rows_are_scored_at_temperature_one(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(ANN, LoraSpec())
        losses = [
            (await engine.forward_backward(ANN, [row([5, 6, 7], 2, temperature=heat)], LossSpec("cross_entropy")))[
                "loss"
            ]
            for heat in (1.0, 0.5)
        ]
    assert losses[0] == losses[1]


async def test_missing_old_logprobs_count_as_ratio_one_and_are_reported(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(ANN, LoraSpec())
        scored = (await engine.score(BASE, [row([5, 6, 7, 8], 3)]))[0]
        one = row([5, 6, 7, 8], 3)
        one.logprobs[1:] = [scored[1], float("nan"), float("-inf")]
        measured = await engine.forward_backward(ANN, [one], LOSS)
        assert measured["logprobs_missing"] == 2.0
        assert measured["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert measured["loss"] == pytest.approx(-3.0, abs=1e-4)


async def test_a_gradient_that_overflows_is_refused_and_dropped(tiny: Tiny) -> None:
    """What was accumulated before goes with it; the policy trains on afterwards."""
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        start = dict(await engine.attach(ANN, LoraSpec()))
        await engine.forward_backward(ANN, batch(), LOSS)
        with pytest.raises(EngineError, match="not finite and was dropped"):
            await engine.forward_backward(ANN, [row([5, 6, 7], 2, logprob=-1e4)], LOSS)
        assert (await engine.optim_step(ANN, ADAM))["stepped"] == 0.0
        assert await published(engine, ANN) == start
        await engine.forward_backward(ANN, batch(), LOSS)
        assert (await engine.optim_step(ANN, ADAM))["stepped"] == 1.0


async def test_kl_is_measured_against_the_base_model(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(ANN, LoraSpec())
        spec = LossSpec("importance_sampling", kl=0.5)
        assert (await engine.forward_backward(ANN, batch(), spec))["kl"] == pytest.approx(0.0, abs=1e-6)
        await engine.optim_step(ANN, ADAM)
        assert (await engine.forward_backward(ANN, batch(), spec))["kl"] > 1e-3


async def test_kl_to_the_base_is_measured_on_a_few_rows_when_the_loss_has_no_kl_term(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(ANN, LoraSpec())
        rows = batch(rows=2)  # as many as are probed, so that both numbers are about the same tokens
        await engine.forward_backward(ANN, rows, LossSpec("importance_sampling"))
        await engine.optim_step(ANN, AdamSpec(lr=0.05))
        probed = await engine.forward_backward(ANN, rows, LossSpec("importance_sampling"))
        counted = await engine.forward_backward(ANN, rows, LossSpec("importance_sampling", kl=1e-9))
        assert counted["kl"] > 1e-3
        assert probed["kl"] == pytest.approx(counted["kl"], rel=1e-4)


async def test_padding_never_reaches_a_score(tiny: Tiny) -> None:
    """A row alone, and beside five longer ones: the same logprobs to 1e-5."""
    short, longer = row([5, 6, 7, 8], 2), [row(range(3, 30 + n), 2) for n in range(5)]
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        alone = (await engine.score(BASE, [short]))[0]
        beside = (await engine.score(BASE, [*longer, short]))[-1]
    assert alone == pytest.approx(beside, abs=1e-5)
    assert alone == pytest.approx(oracle.logprobs(oracle.bare(tiny("qwen3")), [5, 6, 7, 8]), abs=1e-5)


async def test_repeated_answers_are_told_apart_by_place_not_by_text(tiny: Tiny) -> None:
    """Both turns say the same ids; only the second is trained on, and the loss is the second's."""
    ids = [5, 6, 9, 9, 2, 7, 6, 9, 9, 2]
    one = row(ids, 3, weight=1.0)
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        await engine.attach(ANN, LoraSpec())
        measured = await engine.forward_backward(ANN, [one], LossSpec("cross_entropy"))
        scored = (await engine.score(BASE, [one]))[0]
    assert measured["tokens"] == 3.0
    assert measured["loss"] == pytest.approx(-sum(scored[-3:]), abs=1e-4)
