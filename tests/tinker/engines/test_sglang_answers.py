"""Only answers of what was asked for are data: whatever a server answers otherwise is noticed, and another one is asked."""

from __future__ import annotations

import asyncio

import pytest

from tests.tinker.engines.conformance import request, version
from tests.tinker.engines.sglang_fixtures import adapter, engine_on, serving, states, until
from tests.tinker.engines.sglang_stub import Stub
from tinker.engines.engine import EngineError
from tinker.engines.sglang import ServerKeys
from tinker.engines.sglang.replica import State
from tinker.protocol.values import Finish

SERVING = State.SERVING


async def test_every_request_names_the_adapter_of_its_own_version() -> None:
    async with serving(stub := Stub()) as engine:
        asked = []
        for policy in ("p", "q"):
            await engine.load(version(policy, 3), adapter(3))
            asked += [request([5, n], version(policy, 3), key=f"{policy}{n}") for n in range(10)]
        await asyncio.gather(*map(engine.generate, asked))
        await engine.generate(request())
    names = [body["lora_path"] for body in stub.seen("/generate")]
    assert [sum(str(name).startswith(f"{policy}@v000003-") for name in names) for policy in ("p", "q")] == [10, 10]
    assert names[20:] == [None] and len(set(names)) == 3
    rids = [body["rid"] for body in stub.seen("/generate")]
    assert len(set(rids)) == 21 and {len(rid) for rid in rids} == {32}


async def test_nothing_that_shapes_the_distribution_is_left_to_the_server() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.generate(request(temperature=0.7, max_tokens=3, stop_ids=(9,)))
    sampling = stub.seen("/generate")[0]["sampling_params"]
    assert sampling["temperature"] == 0.7 and sampling["max_new_tokens"] == 3 and sampling["stop_token_ids"] == [2, 9]
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["repetition_penalty"]) == (
        1.0,
        -1,
        0.0,
        1.0,
    )


@pytest.mark.parametrize("fault", ["abort", "partial", "other_request", "other_logprobs", "broken", "nonsense"])
async def test_a_bad_answer_is_no_data_and_the_request_is_sent_again(fault: str) -> None:
    async with serving(first := Stub(replies=[[7, 8, 9, 2]]), Stub(replies=[[7, 8, 9, 2]])) as engine:
        setattr(first.faults, fault, 1)
        answer = await engine.generate(request(max_tokens=8))
        assert (answer.ids, answer.finish) == ([7, 8, 9, 2], Finish.STOP)
        assert len(answer.logprobs) == 4
        await until(lambda: states(engine) == [SERVING, SERVING])


async def test_a_server_that_lies_about_its_version_is_out_of_routing_and_nothing_of_it_is_used() -> None:
    async with serving(liar := Stub(replies=[[7, 2]]), honest := Stub(replies=[[8, 2]]), watch=60.0) as engine:
        liar.faults.lie = "agent@v000007"
        answers = await asyncio.gather(*(engine.generate(request([5, n], key=str(n))) for n in range(8)))
        assert {tuple(answer.ids) for answer in answers} == {(8, 2)}
        assert len(honest.seen("/generate")) == 8


async def test_if_all_servers_lie_the_request_fails_and_says_what_they_said() -> None:
    async with serving(stub := Stub()) as engine:
        stub.faults.lie = "somebody's"
        with pytest.raises(EngineError, match=r'no usable answer under base@0 in 3 attempts.*from "somebody.s"'):
            await engine.generate(request())


async def test_a_request_that_a_server_refuses_is_not_carried_from_server_to_server() -> None:
    async with serving(one := Stub(), two := Stub()) as engine:
        one.faults.refuse = two.faults.refuse = "Input length exceeds the maximum"
        with pytest.raises(EngineError, match="refused the request: Input length"):
            await engine.generate(request())
        assert len(one.seen("/generate")) + len(two.seen("/generate")) == 1
        assert states(engine) == [SERVING, SERVING]


async def test_ids_beyond_the_vocabulary_never_reach_a_server() -> None:
    async with serving(stub := Stub()) as engine:
        for wrong in ([engine.card.vocab], [-1], [2**31]):
            with pytest.raises(EngineError, match="another tokenizer"):
                await engine.generate(request(wrong))
        assert stub.seen("/generate") == []


async def test_an_answer_beyond_the_vocabulary_is_no_data() -> None:
    async with serving(Stub(replies=[[100_000, 2]])) as engine:
        with pytest.raises(EngineError, match="another model"):
            await engine.generate(request())


async def test_a_cancelled_request_is_aborted_at_the_server_by_its_whole_id() -> None:
    async with serving(stub := Stub()) as engine:
        stub.go.clear()
        tasks = [asyncio.create_task(engine.generate(request([5, n]))) for n in range(3)]
        await until(lambda: len(stub.running) == 3)
        tasks[0].cancel()
        await until(lambda: len(stub.running) == 2)
        stub.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert all(answer.ids for answer in answers[1:])  # type: ignore[union-attr]
        assert [len(body["rid"]) for body in stub.seen("/abort_request")] == [32]


async def test_a_server_that_dies_in_the_middle_hands_its_requests_to_another() -> None:
    one, two = Stub(replies=[[7, 2]]), Stub(replies=[[8, 2]])
    async with serving(one, two) as engine:
        one.go.clear()
        two.go.clear()
        tasks = [asyncio.create_task(engine.generate(request([5, n], key=str(n)))) for n in range(8)]
        await until(lambda: len(one.running) == len(two.running) == 4)
        await one.die()
        two.go.set()
        answers = await asyncio.gather(*tasks)
        assert {tuple(answer.ids) for answer in answers} == {(8, 2)}


async def test_requests_wait_for_the_only_server_and_it_gets_back_what_it_forgot() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann"), adapter())
        stub.go.clear()
        task = asyncio.create_task(engine.generate(request(under=version("ann"))))
        await until(lambda: stub.running)
        await stub.start_again()
        stub.go.set()
        assert (await task).version == version("ann")
        assert list(stub.adapters) and stub.label != "default"


async def test_a_server_that_was_started_again_behind_our_back_is_noticed_while_idle() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann"), adapter())
        name = next(iter(stub.adapters))
        await stub.start_again()
        await until(lambda: name in stub.adapters and states(engine) == [SERVING])


async def test_a_server_that_answers_nobody_loses_its_requests_to_another() -> None:
    one, two = Stub(replies=[[7, 2]]), Stub(replies=[[8, 2]])
    async with serving(one, two, misses=1) as engine:
        one.go.clear()
        task = asyncio.create_task(engine.generate(request()))
        await until(lambda: one.running)
        one.healthy = False
        assert (await task).ids == [8, 2]


async def test_an_adapter_that_the_server_evicted_is_given_again() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann"), adapter())
        stub.adapters.clear()
        assert (await engine.generate(request(under=version("ann")))).ids
        assert len(stub.adapters) == 1


async def test_the_least_loaded_server_is_asked_and_a_seat_stays_with_its_server() -> None:
    async with serving(one := Stub(), two := Stub()) as engine:
        one.go.clear()
        two.go.clear()
        first = [asyncio.create_task(engine.generate(request([5, n], key=f"run/{n}/ann"))) for n in range(6)]
        await until(lambda: len(one.running) == len(two.running) == 3)
        one.go.set()
        two.go.set()
        await asyncio.gather(*first)
        places = {tuple(body["input_ids"]): stub for stub in (one, two) for body in stub.seen("/generate")}
        for n in reversed(range(6)):
            await engine.generate(request([5, n, 9], key=f"run/{n}/ann"))
        assert all([5, n, 9] in [b["input_ids"] for b in places[5, n].seen("/generate")] for n in range(6))
        await engine.forget("run/0/")
        assert all(not key.startswith("run/0/") for key in engine._registry.fleet._last)


async def test_keys_are_shown_to_the_routes_that_ask_for_them() -> None:
    stub = Stub(key="secret", admin_key="more secret")
    async with serving(stub, keys=ServerKeys("secret", "more secret")) as engine:
        await engine.load(version("ann"), adapter())
        assert (await engine.generate(request(under=version("ann")))).ids
        assert "secret" not in repr(engine._servers)


async def test_leaving_answers_those_who_wait() -> None:
    async with Stub() as stub:
        stub.go.clear()
        async with engine_on(stub) as engine:
            tasks = [asyncio.create_task(engine.generate(request([5, n]))) for n in range(3)]
            await until(lambda: len(stub.running) == 3)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, EngineError) and "closed" in str(answer) for answer in answers)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request())


async def test_a_label_that_is_not_ours_is_refused_at_the_start() -> None:
    async with Stub(label="another run's@v000004-11223344") as stub:
        with pytest.raises(EngineError, match="serves weights called \"another run's"):
            async with engine_on(stub):
                pass


async def test_a_server_of_another_model_is_refused_at_the_start() -> None:
    async with Stub() as stub:
        with pytest.raises(EngineError, match="nats per token away from the model"):
            async with engine_on(stub, probe=True):
                pass


async def test_one_adapter_at_a_time_is_refused_at_the_start() -> None:
    async with Stub(per_batch=1) as stub:
        with pytest.raises(EngineError, match="the base model counts as one"):
            async with engine_on(stub):
                pass
