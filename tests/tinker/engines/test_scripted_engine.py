"""What the scripted engine adds to the contract: its answers can be told beforehand."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest

from tests.tinker.engines.conformance import ADAM, ANN, LOSS, request, row
from tinker.engines.engine import EngineError, GenerateRequest
from tinker.engines.scripted import ScriptedEngine
from tinker.protocol.values import Finish, LoraSpec

REPLIES = [[7, 8, 2], [9, 2], [10, 11, 12, 2]]


async def test_answers_come_from_the_list_by_seed_and_prompt() -> None:
    async with ScriptedEngine(replies=REPLIES) as engine:
        answers = [(await engine.generate(request(seed=seed))).ids for seed in range(40)]
    async with ScriptedEngine(replies=REPLIES) as engine:
        assert [(await engine.generate(request(seed=seed))).ids for seed in range(40)] == answers
    assert {tuple(answer) for answer in answers} == {tuple(reply) for reply in REPLIES}


async def test_logprobs_spread_an_even_choice_over_the_ids() -> None:
    async with ScriptedEngine(replies=REPLIES) as engine:
        answer = await engine.generate(request(seed=1))
    assert sum(answer.logprobs) == pytest.approx(-math.log(3))


async def test_a_function_may_answer_by_the_request() -> None:
    def echo(asked: GenerateRequest) -> list[int]:
        return [*reversed(asked.prompt), 2]

    async with ScriptedEngine(replies=echo) as engine:
        assert (await engine.generate(request([5, 6, 7]))).ids == [7, 6, 5, 2]


async def test_answers_are_cut_like_real_ones() -> None:
    async with ScriptedEngine(replies=[[7, 2, 9, 9]]) as engine:
        answer = await engine.generate(request(max_tokens=8))
        assert (answer.ids, answer.finish) == ([7, 2], Finish.STOP)
        answer = await engine.generate(request(max_tokens=1))
        assert (answer.ids, answer.finish) == ([7], Finish.LENGTH)


async def test_the_same_history_publishes_the_same_bytes_and_another_one_does_not() -> None:
    results = []
    for advantage in (1.0, 1.0, -1.0):
        async with ScriptedEngine() as engine:
            await engine.attach(ANN, LoraSpec())
            await engine.forward_backward(ANN, [row([5, 6, 7], 1, advantage=advantage)], LOSS)
            await engine.optim_step(ANN, ADAM)
            results.append(dict(await engine.publish(ANN)))
    assert results[0] == results[1] != results[2]


async def test_latency_passes_on_the_given_clock() -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with ScriptedEngine(latency=0.25, sleep=sleep) as engine:
        assert (await engine.generate(request())).busy == 0.25
    assert slept == [0.25]


async def test_leaving_answers_those_who_wait() -> None:
    async with ScriptedEngine(latency=1.0, sleep=lambda seconds: anyio.sleep_forever()) as engine:
        tasks = [asyncio.create_task(engine.generate(request(seed=seed))) for seed in range(3)]
        await anyio.wait_all_tasks_blocked()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, EngineError) for answer in answers)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request())
