"""What every engine must do. Each check takes an entered engine that holds nothing yet; `CHECKS` lists them all.

An engine of another kind proves itself with three lines: parametrise a test over `CHECKS`, enter the engine, await the check.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinker.engines.engine import Engine, EngineError, GenerateRequest
from tinker.engines.states import STATE_MANIFEST, STATE_TENSORS
from tinker.protocol.batches import Row
from tinker.protocol.values import BASE, AdamSpec, Finish, LoraSpec, LossSpec, PolicyName, PolicyVersion, Sampling

ANN, BOB = PolicyName("ann"), PolicyName("bob")
LOSS = LossSpec("importance_sampling")
ADAM = AdamSpec(lr=1e-2)


def version(policy: str, number: int = 0) -> PolicyVersion:
    return PolicyVersion(PolicyName(policy), number)


def request(
    prompt: Sequence[int] = (5, 6, 7), under: PolicyVersion = BASE, *, key: str = "run/0/ann", **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(key, under, list(prompt), replace(Sampling(max_tokens=4), **sampling))


def row(
    ids: Sequence[int],
    answer: int,
    *,
    advantage: float = 1.0,
    weight: float = 1.0,
    logprob: float = float("nan"),
    temperature: float = 1.0,
) -> Row:
    """The last `answer` ids are trained on."""
    mask = np.arange(len(ids)) >= len(ids) - answer
    values = [np.where(mask, value, 0.0).astype(np.float32) for value in (logprob, advantage, weight)]
    return Row(np.array(ids, np.int32), mask, *values, temperature=temperature)


async def serves_the_base_under_its_own_name_only(engine: Engine) -> None:
    answer = await engine.generate(request())
    assert answer.version == BASE and answer.ids


async def refuses_a_version_it_does_not_hold(engine: Engine) -> None:
    await engine.load(version("ann", 0), await engine.attach(ANN, LoraSpec()))
    for wrong in (version("ann", 1), version("bob", 0), version("", 1)):
        with pytest.raises(EngineError, match=f"{wrong} is not loaded"):
            await engine.generate(request(under=wrong))
        with pytest.raises(EngineError, match=f"{wrong} is not loaded"):
            await engine.score(wrong, [])
    assert (await engine.generate(request(under=version("ann", 0)))).version == version("ann", 0)


async def loads_the_same_bytes_again_and_refuses_others(engine: Engine) -> None:
    first = await engine.attach(ANN, LoraSpec(seed=1))
    other = await engine.attach(BOB, LoraSpec(seed=2))
    await engine.load(version("ann"), first)
    await engine.load(version("ann"), first)
    with pytest.raises(EngineError, match="immutable"):
        await engine.load(version("ann"), other)


async def refuses_an_adapter_that_is_not_one(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"adapter_model\.safetensors"):
        await engine.load(version("ann"), {"adapter_config.json": b"{}"})


async def stops_serving_what_was_unloaded(engine: Engine) -> None:
    await engine.load(version("ann"), await engine.attach(ANN, LoraSpec()))
    await engine.unload(version("ann"))
    await engine.unload(version("ann"))
    await engine.unload(version("nobody"))
    with pytest.raises(EngineError, match="not loaded"):
        await engine.generate(request(under=version("ann")))


async def answers_have_one_logprob_per_id_and_say_why_they_ended(engine: Engine) -> None:
    for seed in range(8):
        answer = await engine.generate(request(max_tokens=5, seed=seed))
        assert len(answer.ids) == len(answer.logprobs) > 0
        assert all(logprob <= 0.0 for logprob in answer.logprobs)
        ended = answer.ids[-1] in engine.card.eos_ids
        assert answer.finish == (Finish.STOP if ended else Finish.LENGTH)
        assert ended or len(answer.ids) == 5
        assert not any(token in engine.card.eos_ids for token in answer.ids[:-1])


async def keeps_the_stop_id_as_the_last_of_the_answer(engine: Engine) -> None:
    whole = await engine.generate(request(max_tokens=6, temperature=0.0))
    stop = whole.ids[0]
    cut = await engine.generate(request(max_tokens=6, temperature=0.0, stop_ids=(stop,)))
    assert (cut.ids, cut.finish) == ([stop], Finish.STOP)


async def the_same_seed_gives_the_same_answer(engine: Engine) -> None:
    ask = request(max_tokens=6, seed=11)
    first, second = await engine.generate(ask), await engine.generate(replace(ask, cache_key="elsewhere"))
    assert first.ids == second.ids and first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


async def a_prompt_that_leaves_no_room_gets_an_empty_context_answer(engine: Engine) -> None:
    for length in (engine.card.context, engine.card.context + 5):
        answer = await engine.generate(request([5] * length))
        assert (answer.ids, answer.logprobs, answer.finish) == ([], [], Finish.CONTEXT)


async def an_answer_is_cut_where_the_context_ends(engine: Engine) -> None:
    answer = await engine.generate(request([5] * (engine.card.context - 2), max_tokens=16))
    assert len(answer.ids) <= 2
    assert answer.finish == (Finish.STOP if answer.ids[-1] in engine.card.eos_ids else Finish.CONTEXT)


async def refuses_requests_that_cannot_be_right(engine: Engine) -> None:
    for wrong, message in (
        (request([5, engine.card.vocab]), f"id {engine.card.vocab}"),
        (request([-1]), "id -1"),
        (request([]), "prompt"),
        (request(max_tokens=0), "max_tokens"),
        (request(temperature=float("nan")), "temperature"),
        (request(temperature=-1.0), "temperature"),
    ):
        with pytest.raises(EngineError, match=message):
            await engine.generate(wrong)


async def many_requests_at_once_are_all_answered(engine: Engine) -> None:
    await engine.load(version("ann"), await engine.attach(ANN, LoraSpec()))
    asked = [request([5 + n % 7] * (1 + n % 9), (BASE, version("ann"))[n % 2], key=f"k{n}", seed=n) for n in range(40)]
    answers = await asyncio.gather(*map(engine.generate, asked))
    assert [answer.version for answer in answers] == [ask.policy for ask in asked]


async def forgetting_changes_no_answer(engine: Engine) -> None:
    ask = request(list(range(5, 25)), seed=3)
    before = await engine.generate(ask)
    await engine.forget("run/")
    assert (await engine.generate(ask)).ids == before.ids


async def scores_every_token_but_the_first(engine: Engine) -> None:
    scored = await engine.score(BASE, [row([5, 6, 7, 8], 2), row([5], 0), row([9, 9], 1)])
    assert [len(values) for values in scored] == [4, 1, 2]
    assert all(values[0] == 0.0 and all(value < 0.0 for value in values[1:]) for values in scored)


async def attaching_is_seeded_and_names_are_taken_once(engine: Engine) -> None:
    first = dict(await engine.attach(ANN, LoraSpec(seed=5)))
    with pytest.raises(EngineError, match="attached already"):
        await engine.attach(ANN, LoraSpec(seed=5))
    await engine.detach(ANN)
    await engine.detach(ANN)
    assert dict(await engine.attach(ANN, LoraSpec(seed=5))) == first
    assert dict(await engine.attach(BOB, LoraSpec(seed=6))) != first


async def refuses_a_lora_that_does_not_fit(engine: Engine) -> None:
    for name, lora, message in (
        (ANN, LoraSpec(targets=("lm_head",)), "lm_head"),
        (ANN, LoraSpec(targets=()), "nothing"),
        (ANN, LoraSpec(rank=0), "rank"),
        (PolicyName(""), LoraSpec(), "name"),
    ):
        with pytest.raises(EngineError, match=message):
            await engine.attach(name, lora)


async def refuses_updates_of_policies_it_does_not_have(engine: Engine) -> None:
    for refused in (engine.publish(ANN), engine.optim_step(ANN, ADAM), engine.forward_backward(ANN, [], LOSS)):
        with pytest.raises(EngineError, match="ann is not attached"):
            await refused


async def an_update_changes_what_is_published_and_nothing_else_does(engine: Engine) -> None:
    start = dict(await engine.attach(ANN, LoraSpec()))
    measured = await engine.forward_backward(ANN, [row([5, 6, 7, 8], 2)], LOSS)
    assert measured["tokens"] == 2.0
    assert {"loss", "entropy", "kl", "ratio_mean", "clip_fraction", "logprob_gap_max"} <= set(measured)
    assert dict(await engine.publish(ANN)) == start
    stepped = await engine.optim_step(ANN, ADAM)
    assert stepped["stepped"] == 1.0 and stepped["grad_norm"] > 0.0
    assert dict(await engine.publish(ANN)) != start


async def a_step_without_a_gradient_moves_nothing(engine: Engine) -> None:
    await engine.attach(ANN, LoraSpec())
    await engine.forward_backward(ANN, [row([5, 6, 7, 8], 2)], LOSS)
    await engine.optim_step(ANN, ADAM)  # now there is momentum
    before = dict(await engine.publish(ANN))
    for nothing in ([], [row([5, 6, 7], 0)], [row([5, 6, 7], 2, advantage=0.0)], [row([5, 6, 7], 2, weight=0.0)]):
        measured = await engine.forward_backward(ANN, nothing, LOSS)
        assert measured["loss"] == 0.0
        assert await engine.optim_step(ANN, ADAM) == {"grad_norm": 0.0, "stepped": 0.0}
    assert dict(await engine.publish(ANN)) == before


async def rewinding_undoes_everything_since_a_publication(engine: Engine) -> None:
    await engine.attach(ANN, LoraSpec())
    published = []
    for rewound in (False, True):
        if rewound:
            await engine.forward_backward(ANN, [row([5, 9, 7, 8], 1)], LOSS)
            await engine.optim_step(ANN, ADAM)
            await engine.forward_backward(ANN, [row([9, 6, 7, 8], 1)], LOSS)  # a gradient that nobody applied
            await engine.rewind(ANN, published[0])
        published.append(dict(await engine.publish(ANN)))
        await engine.forward_backward(ANN, [row([5, 6, 7, 8], 2)], LOSS)
        await engine.optim_step(ANN, ADAM)
        published.append(dict(await engine.publish(ANN)))
    assert published[2:] == published[:2]


async def refuses_to_rewind_to_files_of_another_kind(engine: Engine) -> None:
    files = dict(await engine.attach(ANN, LoraSpec()))
    for wrong in ({}, dict.fromkeys(files, b"nonsense")):
        with pytest.raises(EngineError):
            await engine.rewind(ANN, wrong)
    with pytest.raises(EngineError, match="bob is not attached"):
        await engine.rewind(BOB, files)
    assert dict(await engine.publish(ANN)) == files


async def training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(engine: Engine) -> None:
    async def step(ids: Sequence[int]) -> dict[str, bytes]:
        await engine.forward_backward(ANN, [row(ids, 2)], LOSS)
        await engine.optim_step(ANN, ADAM)
        return dict(await engine.publish(ANN))

    await engine.attach(ANN, LoraSpec(seed=3, rank=4))
    for ids in ([5, 6, 7, 8], [9, 6, 7, 8]):
        await step(ids)
    saved = dict(await engine.save_state(ANN))
    assert dict(await engine.save_state(ANN)) == saved
    expected = [dict(await engine.publish(ANN)), await step([5, 5, 7, 9]), await step([8, 6, 6, 8])]
    await engine.forward_backward(ANN, [row([7, 7, 7, 7], 2)], LOSS)  # a gradient that the state does not have
    await engine.load_state(ANN, saved)
    assert [dict(await engine.publish(ANN)), await step([5, 5, 7, 9]), await step([8, 6, 6, 8])] == expected
    await engine.detach(ANN)
    await engine.load_state(ANN, saved)  # attached by it
    assert [dict(await engine.publish(ANN)), await step([5, 5, 7, 9]), await step([8, 6, 6, 8])] == expected


async def a_fresh_policy_can_be_saved_and_loaded_under_another_name(engine: Engine) -> None:
    files = dict(await engine.attach(ANN, LoraSpec(seed=3)))
    await engine.load_state(BOB, await engine.save_state(ANN))
    assert dict(await engine.publish(BOB)) == files


async def refuses_a_state_that_is_torn_or_not_its_own(engine: Engine) -> None:
    await engine.attach(ANN, LoraSpec())
    saved = dict(await engine.save_state(ANN))
    manifest, tensors = saved[STATE_MANIFEST], saved[STATE_TENSORS]
    flipped = tensors[:-1] + bytes([tensors[-1] ^ 1])
    for wrong, message in (
        ({}, "got no files"),
        ({STATE_MANIFEST: manifest}, "got state.json"),
        ({**saved, STATE_TENSORS: tensors[:-1]}, "state.safetensors is damaged"),
        ({**saved, STATE_TENSORS: flipped}, "state.safetensors is damaged"),
        ({**saved, STATE_MANIFEST: manifest[:-9]}, "no manifest of a state"),
        ({**saved, STATE_MANIFEST: manifest.replace(b'"format": 1', b'"format": 9')}, "format 9"),
        (
            {**saved, STATE_MANIFEST: manifest.replace(json.loads(manifest)["engine"].encode(), b"other")},
            "engine other",
        ),
    ):
        for name in (ANN, BOB):
            with pytest.raises(EngineError, match=message):
                await engine.load_state(name, wrong)
    with pytest.raises(EngineError, match="bob is not attached"):
        await engine.save_state(BOB)
    assert dict(await engine.save_state(ANN)) == saved


async def policies_do_not_touch_one_another(engine: Engine) -> None:
    await engine.attach(ANN, LoraSpec(seed=1))
    bob = dict(await engine.attach(BOB, LoraSpec(seed=2)))
    await engine.forward_backward(ANN, [row([5, 6, 7, 8], 2)], LOSS)
    await engine.optim_step(ANN, ADAM)
    assert (await engine.optim_step(BOB, ADAM))["stepped"] == 0.0
    assert dict(await engine.publish(BOB)) == bob


async def refuses_rows_that_would_poison_an_update(engine: Engine) -> None:
    start = dict(await engine.attach(ANN, LoraSpec()))
    for wrong, message in (
        (row([5, 6, 7], 1, advantage=float("nan")), "row 1 has a non-finite advantage"),
        (row([5, 6, 7], 1, weight=float("inf")), "row 1 has a non-finite weight"),
        (row([5, 6, 7], 3), "first token"),
        (row([5, engine.card.vocab], 1), "another tokenizer"),
        (row([5] * (engine.card.context + 1), 1), "tokens but"),
    ):
        with pytest.raises(EngineError, match=message):
            await engine.forward_backward(ANN, [row([5, 6, 7], 1), wrong], LOSS)
    with pytest.raises(EngineError, match="no loss 'typo'"):
        await engine.forward_backward(ANN, [], LossSpec("typo"))
    assert (await engine.optim_step(ANN, ADAM))["stepped"] == 0.0
    assert dict(await engine.publish(ANN)) == start


CHECKS: list[Callable[[Engine], Awaitable[None]]] = [
    value for value in list(globals().values()) if asyncio.iscoroutinefunction(value) and value.__module__ == __name__
]
