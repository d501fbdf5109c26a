"""Sampling: the right tokens, the right logprobs, whatever else is in the batch and in the cache."""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore::FutureWarning")]
pytest.importorskip("torch")
pytest.importorskip("peft")

import torch

from tests.tinker.engines import torch_oracles as oracle
from tests.tinker.engines.conformance import request, row, version
from tinker.engines.engine import EngineError, Generation
from tinker.engines.torch import TorchEngine
from tinker.protocol.values import BASE, Finish, LoraSpec, PolicyName, PolicyVersion

Tiny = Callable[[str], Path]
SPECS = {
    "small": LoraSpec(rank=2, alpha=4.0, seed=1),
    "large": LoraSpec(rank=6, alpha=3.0, seed=2),
    "partial": LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), seed=3),
}


async def serve(engine: TorchEngine) -> dict[PolicyVersion, dict[str, bytes]]:
    """Three adapters of different rank, scale and targets, none of them zero, all loaded."""
    loaded = {}
    for number, (name, spec) in enumerate(SPECS.items()):
        loaded[version(name, 1)] = oracle.noisy(await engine.attach(PolicyName(name), spec), seed=number)
    for served, files in loaded.items():
        await engine.load(served, files)
    return loaded


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
async def test_greedy_answers_equal_those_of_transformers(family: str, tiny: Tiny) -> None:
    model = oracle.bare(tiny(family))
    prompts = [list(range(3, 3 + length)) for length in (1, 4, 9, 17, 30)]
    async with TorchEngine(str(tiny(family))) as engine:
        asked = [request(prompt, max_tokens=12, temperature=0.0, key=str(n)) for n, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*map(engine.generate, asked))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert answer.ids == wanted[0, len(prompt) :].tolist()
        assert answer.logprobs == pytest.approx(oracle.logprobs(model, prompt + answer.ids)[len(prompt) :], abs=1e-4)


async def test_sampled_logprobs_equal_those_scored_by_the_engine_and_by_peft(tiny: Tiny, tmp_path: Path) -> None:
    """Mixed adapters, lengths and temperatures, several turns on a kept cache: more than 1000 tokens within 1e-4."""
    noise = np.random.default_rng(0)
    async with TorchEngine(str(tiny("qwen3")), slots=7) as engine:
        loaded = await serve(engine)
        under = [*loaded, BASE]
        models = {
            served: oracle.with_adapter(tiny("qwen3"), files, tmp_path / served.policy)
            for served, files in loaded.items()
        }
        models[BASE] = oracle.bare(tiny("qwen3"))
        heats = (1.0, 0.7, 1.3)
        contexts = {seat: noise.integers(3, 61, 2 + seat % 11).tolist() for seat in range(40)}
        checked, worst_engine, worst_peft = 0, 0.0, 0.0
        for turn in range(3):
            asked = [
                request(
                    ids,
                    under[seat % 4],
                    key=f"run/{seat}",
                    max_tokens=6 + seat % 9,
                    temperature=heats[seat % 3],
                    seed=100 * turn + seat,
                )
                for seat, ids in contexts.items()
            ]
            answers = await asyncio.gather(*map(engine.generate, asked))
            for seat, answer in enumerate(answers):
                ids, start = contexts[seat] + answer.ids, len(contexts[seat])
                heat = heats[seat % 3]
                scored = (await engine.score(under[seat % 4], [row(ids, 1, temperature=heat)]))[0]
                told = oracle.logprobs(models[under[seat % 4]], ids, heat)
                gaps = [abs(np.array(answer.logprobs) - other[start:]).max() for other in (scored, told)]
                worst_engine, worst_peft = max(worst_engine, gaps[0]), max(worst_peft, gaps[1])
                checked += len(answer.ids)
                contexts[seat] = ids + noise.integers(3, 61, 1 + seat % 5).tolist()
    print(f"{checked} tokens: at most {worst_engine:.1e} from the engine's own score, {worst_peft:.1e} from PEFT's")
    assert checked >= 1000
    assert worst_engine < 1e-4
    assert worst_peft < 1e-4


async def test_many_adapters_in_one_batch_go_row_by_row_through_the_same_sums(tiny: Tiny, tmp_path: Path) -> None:
    """More stacked rank columns than the dense product takes (the gathered path)."""
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        loaded = {}
        for number in range(12):
            name = PolicyName(f"p{number}")
            loaded[version(name)] = oracle.noisy(
                await engine.attach(name, LoraSpec(rank=5 + number % 4, seed=number)), seed=number
            )
            await engine.load(version(name), loaded[version(name)])
        asked = [
            request(range(3, 6 + n % 5), served, key=str(n), seed=n)
            for n, served in enumerate([*loaded, BASE, *loaded])
        ]
        answers = await asyncio.gather(*map(engine.generate, asked))
        for number in (0, 7, 11):
            model = oracle.with_adapter(tiny("qwen3"), loaded[version(f"p{number}")], tmp_path / str(number))
            for ask, answer in zip(asked, answers, strict=True):
                if ask.policy == version(f"p{number}"):
                    told = oracle.logprobs(model, [*ask.prompt, *answer.ids])[len(ask.prompt) :]
                    assert answer.logprobs == pytest.approx(told, abs=1e-4)


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        served = list(await serve(engine))
        asked = [request(range(3, 5 + n % 6), served[n % 3], key=f"a{n}", max_tokens=10, seed=n) for n in range(24)]
        together = await asyncio.gather(*map(engine.generate, asked))
        await engine.forget("")
        alone = [await engine.generate(ask) for ask in asked]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


async def test_seeds_spread_answers_as_the_reported_probabilities_say(tiny: Tiny) -> None:
    """1,500 first tokens of one prompt: frequencies are within five standard errors."""
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        asked = [request(max_tokens=1, seed=n, key=str(n % 9)) for n in range(1500)]
        answers = await asyncio.gather(*map(engine.generate, asked))
    counts = Counter(answer.ids[0] for answer in answers)
    told = {answer.ids[0]: float(np.exp(answer.logprobs[0])) for answer in answers}
    assert len(counts) > 5
    for token, probability in told.items():
        assert abs(counts[token] / 1500 - probability) < 5 * (probability * (1 - probability) / 1500) ** 0.5 + 1e-3


def test_evenly_spread_uniforms_give_every_token_its_exact_share() -> None:
    from tinker.engines.torch.sampling import plan, sample

    many = 5000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2.0
    uniforms = [(number + 0.5) / many for number in range(many)]
    ids, logprobs = sample(logits.expand(many, -1), plan([0.7] * many), uniforms)
    wanted = torch.softmax(logits / 0.7, -1)
    assert [abs(Counter(ids)[token] - many * float(wanted[token])) <= 1.01 for token in range(12)] == [True] * 12
    assert logprobs == pytest.approx([float(wanted[token].log()) for token in ids], abs=1e-5)


async def test_requests_join_and_leave_a_running_batch(tiny: Tiny) -> None:
    """Two slots, staggered arrivals, answers of different lengths; every one equals the answer it gets alone."""
    async with TorchEngine(str(tiny("qwen3")), slots=2) as engine:
        served = list(await serve(engine))
        asked = [
            request(range(3, 4 + n), served[n % 3], key=f"b{n}", max_tokens=3 + 7 * (n % 3), seed=n) for n in range(9)
        ]
        running = []
        for ask in asked:
            running.append(asyncio.create_task(engine.generate(ask)))
            await engine.score(BASE, [])  # one turn of the engine's loop
        together = await asyncio.gather(*running)
        await engine.forget("")
        assert [answer.ids for answer in together] == [(await engine.generate(ask)).ids for ask in asked]


async def test_a_cancelled_caller_leaves_the_batch_and_the_others_go_on(tiny: Tiny) -> None:
    """One request is cancelled while it runs (it would take over 60 more steps), one while it waits."""
    async with TorchEngine(str(tiny("qwen3")), slots=2) as engine:
        asked = [request(max_tokens=100, seed=n, key=str(n), temperature=3.0) for n in range(60)]
        lengths = [len((await engine.generate(ask)).ids) for ask in asked]
        long = asked[lengths.index(max(lengths))]
        short = [request(range(3, 6 + n), key=f"c{n}", max_tokens=4, seed=n) for n in range(3)]
        tasks = [asyncio.create_task(engine.generate(ask)) for ask in (long, *short, long)]
        await engine.score(BASE, [])
        tasks[0].cancel()
        tasks[4].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(2):
            await engine.score(BASE, [])
        assert max(lengths) > 70
        assert [type(answer) for answer in answers] == [
            asyncio.CancelledError,
            *[Generation] * 3,
            asyncio.CancelledError,
        ]
        assert engine.running == 0


async def test_leaving_answers_every_waiter(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3")), slots=1) as engine:
        tasks = [
            asyncio.create_task(engine.generate(request(max_tokens=100, temperature=9.0, seed=n, key=str(n))))
            for n in range(20)
        ]
        tasks.append(asyncio.create_task(engine.score(BASE, [row([5] * 60, 1)] * 50)))  # type: ignore[arg-type]
        await engine.score(BASE, [])
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(answer, EngineError) for answer in answers)
    assert all(isinstance(answer, EngineError | Generation | list) for answer in answers)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request())


async def test_unloading_lets_requests_in_flight_finish(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3")), slots=1) as engine:
        (served, *_) = await serve(engine)
        tasks = [
            asyncio.create_task(engine.generate(request(under=served, max_tokens=30, seed=n, key=str(n))))
            for n in range(4)
        ]
        await engine.score(BASE, [])
        await engine.unload(served)
        assert all(task.done() for task in tasks)
        assert {task.result().version for task in tasks} == {served}
        with pytest.raises(EngineError, match="not loaded"):
            await engine.generate(request(under=served))


async def test_a_kept_context_gives_the_same_logprobs_as_a_fresh_one_for_less_work(tiny: Tiny) -> None:
    prompt = list(range(3, 40))
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        (served, *_) = await serve(engine)
        first = await engine.generate(request(prompt, served, max_tokens=5, stop_ids=(), seed=1))
        longer = [*prompt, *first.ids, 7, 8, 9]
        before = engine.prefilled
        warm = await engine.generate(request(longer, served, max_tokens=8, seed=2))
        assert engine.prefilled - before == 4  # the last sampled id was not in the cache yet
        await engine.forget("")
        cold = await engine.generate(request(longer, served, key="another", max_tokens=8, seed=2))
        assert engine.prefilled - before == 4 + len(longer)
        assert warm.ids == cold.ids and warm.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
        other = [*prompt[:20], 50, 51]
        branched = await engine.generate(request(other, served, max_tokens=8, seed=3))
        assert branched.ids == (await engine.generate(request(other, served, key="third", max_tokens=8, seed=3))).ids


async def test_a_kept_context_is_not_used_under_other_weights(tiny: Tiny) -> None:
    """The same key under a new version, and under the same name after a reload with other weights, gives what a cold engine gives."""
    prompt = list(range(3, 40))
    ask = request(prompt, version("ann", 1), temperature=0.0, max_tokens=10)
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        blank = await engine.attach(PolicyName("ann"), LoraSpec())
        alpha, beta = oracle.noisy(blank, 1), oracle.noisy(blank, 2)
        await engine.load(version("ann", 1), alpha)
        as_alpha = await engine.generate(ask)
        await engine.unload(version("ann", 1))
        await engine.load(version("ann", 1), beta)
        as_beta = await engine.generate(ask)
        await engine.load(version("ann", 2), alpha)
        again = await engine.generate(request(prompt, version("ann", 2), temperature=0.0, max_tokens=10))
        await engine.forget("")
        cold = await engine.generate(ask)
    assert as_beta.ids == cold.ids and as_beta.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    assert again.logprobs == pytest.approx(as_alpha.logprobs, abs=1e-4)
    assert as_alpha.logprobs != pytest.approx(as_beta.logprobs, abs=1e-2)


async def test_kept_contexts_are_bounded_and_the_longest_unused_goes_first(tiny: Tiny) -> None:
    """Room for two contexts of 20 tokens: a, b, a again, c; then a is still there and b is gone."""
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, bytes
    async with TorchEngine(str(tiny("qwen3")), cache_bytes=45 * per_token) as engine:
        computed = []
        for name in ("a", "b", "a", "c", "a", "b"):
            before = engine.prefilled
            prompt = [3 + "abc".index(name), *range(3, 22)]
            await engine.generate(request(prompt, key=name, max_tokens=1, seed=5))
            computed.append(engine.prefilled - before)
    assert computed == [20, 20, 1, 20, 1, 20]


async def test_equal_prompts_are_computed_once(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3")), linger=0.05) as engine:
        served = list(await serve(engine))
        before = engine.prefilled
        asked = [request(range(3, 23), served[n % 2], key=f"g{n}", max_tokens=6, seed=n) for n in range(16)]
        together = await asyncio.gather(*map(engine.generate, asked))
        assert engine.prefilled - before == 2 * 20
        await engine.forget("")
        assert [answer.ids for answer in together] == [(await engine.generate(ask)).ids for ask in asked]


async def test_a_prompt_that_begins_like_another_context_computes_only_the_rest(tiny: Tiny) -> None:
    """Kept from an answer that is complete, or of a row that runs; under the same weights only; and the answers are the same."""
    start = list(range(3, 33))
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        under, other, *_ = await serve(engine)
        ends = {"kept": [40, 41], "running": [50], "others": [51, 52, 53]}

        async def computed(name: str, served: PolicyVersion) -> tuple[int, Generation]:
            before = engine.prefilled
            answer = await engine.generate(request([*start, *ends[name]], served, key=name, max_tokens=6, seed=4))
            return engine.prefilled - before, answer

        assert (await computed("kept", under))[0] == 32
        await engine.generate(request([60], under, key="fills the cache", max_tokens=1))
        assert (await computed("running", under))[0] == 1
        assert (await computed("others", other))[0] == 33
        await engine.forget("")
        before = engine.prefilled
        running = asyncio.create_task(
            engine.generate(request([*start, 44], under, key="long", max_tokens=80, temperature=9.0, seed=1))
        )
        while engine.prefilled == before:
            await engine.score(BASE, [])
        shared, answer = await computed("kept", under)
        running.cancel()
        await engine.forget("")
        fresh, again = await computed("kept", under)
    assert (shared, fresh) == (2, 32)
    assert answer.ids == again.ids and answer.logprobs == pytest.approx(again.logprobs, abs=1e-4)


async def test_broken_weights_fail_their_own_requests_only(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3")), slots=4, linger=0.05) as engine:
        blank = await engine.attach(PolicyName("ann"), LoraSpec())
        await engine.load(version("ann", 1), oracle.noisy(blank, 1, size=1e30))
        for turn in range(3):
            asked = [
                request(range(3, 9 + n), (BASE, version("ann", 1))[n % 2], key=f"{turn}{n}", seed=n) for n in range(8)
            ]
            answers = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
            assert [type(answer) for answer in answers] == [Generation, EngineError] * 4
            assert "ann@1 are not finite" in str(answers[1])


async def test_greedy_logprobs_are_those_of_temperature_one(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("qwen3"))) as engine:
        answer = await engine.generate(request(temperature=0.0, max_tokens=6))
        scored = await engine.score(BASE, [row([5, 6, 7, *answer.ids], 1)])
    assert answer.logprobs == pytest.approx(scored[0][3:], abs=1e-4)


async def test_tempered_logprobs_equal_the_worked_numbers() -> None:
    """Logits [2, 1, 0]: -0.4076 at temperature 1, -0.1429 at 0.5."""
    from tinker.engines.torch.sampling import plan, sample

    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    ids, logprobs = sample(logits, plan([1.0, 0.5, 0.0]), [0.5, 0.5, 0.5])
    assert ids == [0, 0, 0]
    assert logprobs == pytest.approx([-0.4076, -0.1429, -0.4076], abs=1e-4)


async def test_the_reason_an_answer_ends_is_length_or_context_by_which_came_first(tiny: Tiny) -> None:
    async with TorchEngine(str(tiny("llama")), max_context=24) as engine:
        assert engine.card.context == 24
        ends = {}
        for budget in (3, 4, 5):
            answer = await engine.generate(request([5] * 20, max_tokens=budget, temperature=0.0))
            ends[budget] = (len(answer.ids), answer.finish)
    assert ends == {3: (3, Finish.LENGTH), 4: (4, Finish.LENGTH), 5: (4, Finish.CONTEXT)}
