"""Adapters and whole models on several servers: loaded before they are routed to, on all of them or not at all, let go of when idle."""

from __future__ import annotations

import asyncio
import base64
import pickle
import re
from pathlib import Path

import pytest

from tests.tinker.engines.conformance import request, version
from tests.tinker.engines.sglang_fixtures import adapter, serving, states, until, whole_model
from tests.tinker.engines.sglang_stub import Stub
from tinker.engines.engine import EngineError
from tinker.engines.sglang import Transfer
from tinker.engines.sglang.replica import State

SERVING, FENCED = State.SERVING, State.FENCED
FULL = 8  # of tokens


async def test_a_version_has_one_name_everywhere_and_other_weights_another() -> None:
    async with serving(one := Stub(), two := Stub()) as engine:
        await engine.load(version("run/agent", 12), adapter(1))
        assert list(one.adapters) == list(two.adapters)
        name, path = next(iter(one.adapters.items()))
        assert name.startswith("run-agent@v000012-")
        assert (Path(path) / "adapter_model.safetensors").read_bytes() == adapter(1)["adapter_model.safetensors"]
        await engine.load(version("run-agent", 12), adapter(2))
        assert len(one.adapters) == 2


async def test_a_version_is_not_routed_to_before_a_server_has_it() -> None:
    async with serving(stub := Stub()) as engine:
        stub.loading.clear()
        load = asyncio.create_task(engine.load(version("ann"), adapter()))
        await until(lambda: stub.seen("/load_lora_adapter"))
        with pytest.raises(EngineError, match="not loaded"):
            await engine.generate(request(under=version("ann")))
        stub.loading.set()
        await load
        assert (await engine.generate(request(under=version("ann")))).ids


@pytest.mark.parametrize("fault", [{"refuse_load": "rank 64 > 16"}, {"broken_load": 99}, {"lose_load": 99}])
async def test_a_server_that_refuses_what_others_hold_is_out_of_routing_until_it_takes_it(
    fault: dict[str, object],
) -> None:
    good, bad, also = Stub(replies=[[7, 2]]), Stub(replies=[[8, 2]]), Stub(replies=[[7, 2]])
    async with serving(good, bad, also) as engine:
        for name, value in fault.items():
            setattr(bad.faults, name, value)
        await engine.load(version("ann"), adapter())
        assert states(engine)[1] is not SERVING and "ann@0" in engine.replicas[1].reason
        answers = await asyncio.gather(
            *(engine.generate(request([5, n], version("ann"), key=str(n))) for n in range(12))
        )
        assert {tuple(answer.ids) for answer in answers} == {(7, 2)}
        await engine.load(version("ann", 1), adapter(1))
        await engine.unload(version("ann"))
        for name, value in fault.items():
            setattr(bad.faults, name, type(value)())
        await until(lambda: states(engine) == [SERVING] * 3)
        await until(lambda: [name[:11] for name in bad.adapters] == ["ann@v000001"])


async def test_an_adapter_that_every_server_refuses_is_at_fault_and_nothing_has_changed() -> None:
    async with serving(one := Stub(), two := Stub()) as engine:
        one.faults.refuse_load = two.faults.refuse_load = "LoRA rank 64 exceeds the maximum"
        with pytest.raises(EngineError, match=r"no server takes ann@0.*rank 64 exceeds"):
            await engine.load(version("ann"), adapter())
        assert states(engine) == [SERVING, SERVING]
        one.faults.refuse_load = two.faults.refuse_load = ""
        await engine.load(version("ann"), adapter(5))
        assert (await engine.generate(request(under=version("ann")))).ids


async def test_a_version_that_is_published_while_the_only_server_is_away_waits_for_it() -> None:
    async with serving(stub := Stub()) as engine:
        await stub.die()
        load = asyncio.create_task(engine.load(version("ann"), adapter()))
        await until(lambda: states(engine) != [SERVING])
        await stub.start_again()
        await load
        assert (await engine.generate(request(under=version("ann")))).ids


async def test_fifty_updates_of_three_agents_leave_no_more_than_the_window_behind() -> None:
    most = 0
    async with serving(stub := Stub()) as engine:
        for number in range(50):
            for policy in "pqr":
                await engine.load(version(policy, number), adapter(number))
                await engine.unload(version(policy, number - 2))
                most = max(most, len(stub.adapters))
        await until(lambda: len(stub.adapters) == 6)
    assert most <= 3 * (2 + 1) + 3  # two kept, one coming, and those going


async def test_publishing_while_others_generate_fails_nobody() -> None:
    async with serving(Stub(), Stub()) as engine:
        newest = dict.fromkeys("pq", 0)

        async def publish(policy: str) -> None:
            for number in range(1, 9):
                await engine.load(version(policy, number), adapter(number))
                newest[policy] = number
                await engine.unload(version(policy, number - 2))

        async def client(policy: str) -> None:
            while newest[policy] < 8:
                wanted = version(policy, newest[policy])
                assert (await engine.generate(request([5], wanted, key=policy))).version == wanted

        for policy in newest:
            await engine.load(version(policy, 0), adapter())
        async with asyncio.TaskGroup() as tasks:
            for policy in newest:
                tasks.create_task(publish(policy))
                tasks.create_task(client(policy))


async def test_an_unloaded_version_is_refused_at_once_and_its_requests_finish() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann"), adapter())
        stub.go.clear()
        task = asyncio.create_task(engine.generate(request(under=version("ann"))))
        await until(lambda: stub.running)
        await engine.unload(version("ann"))
        with pytest.raises(EngineError, match="not loaded"):
            await engine.generate(request(under=version("ann")))
        assert stub.seen("/unload_lora_adapter") == []
        stub.go.set()
        assert (await task).version == version("ann")
        await until(lambda: not stub.adapters)


async def test_an_unload_that_is_refused_is_tried_again_and_breaks_nothing() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann"), adapter())
        stub.faults.refuse_unload = 3
        await engine.unload(version("ann"))
        await engine.load(version("ann", 1), adapter(1))
        await until(lambda: [name[:11] for name in stub.adapters] == ["ann@v000001"])
        assert states(engine) == [SERVING]


async def test_a_version_loaded_again_is_loaded_after_it_was_let_go() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann"), adapter())
        await engine.unload(version("ann"))
        await engine.load(version("ann"), adapter())
        assert len(stub.adapters) == 1
        assert (await engine.generate(request(under=version("ann")))).ids


async def test_no_more_adapters_than_the_servers_hold_and_those_of_others_count() -> None:
    async with serving(stub := Stub(max_loaded=3)) as engine:
        stub.adapters["somebody's"] = "/elsewhere"
        await stub.start_again()
        stub.adapters["somebody's"] = "/elsewhere"
        await until(lambda: states(engine) == [SERVING] and engine.replicas[0].facts.loaded)  # type: ignore[union-attr]
        await engine.load(version("ann", 0), adapter(0))
        await engine.load(version("ann", 1), adapter(1))
        with pytest.raises(EngineError, match="2 adapters are served and the servers hold 2 at most"):
            await engine.load(version("ann", 2), adapter(2))
        await engine.unload(version("ann", 0))
        await engine.load(version("ann", 2), adapter(2))
        assert "somebody's" in stub.adapters


async def test_without_a_common_file_system_adapters_go_over_the_wire() -> None:
    torch = pytest.importorskip("torch")
    async with serving(one := Stub(), two := Stub(), transfer=Transfer.TENSORS) as engine:
        await engine.load(version("ann"), adapter(5))
    for stub in (one, two):
        (body,) = stub.seen("/load_lora_adapter_from_tensors")
        tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))  # noqa: S301 (our own)
        assert torch.equal(tensors["base_model.model.q_proj.lora_A.weight"], torch.full((1, 4), 5.0))
        assert body["config_dict"]["r"] == 1


# --- whole models ---


@pytest.mark.parametrize("transfer", [Transfer.FILES, Transfer.TENSORS])
async def test_a_whole_model_replaces_the_weights_of_its_servers(transfer: Transfer) -> None:
    async with serving(one := Stub(), two := Stub(), transfer=transfer) as engine:
        for number in (1, 2):
            await engine.load(version("ann", number), whole_model(number))
            answer = await engine.generate(request(under=version("ann", number)))
            assert answer.version == version("ann", number)
            with pytest.raises(EngineError, match="not loaded"):
                await engine.generate(request(under=version("ann", number - 1)))
        assert (await engine.generate(request())).ids  # the other server still has the base model
        assert two.label.startswith("ann@v000002-") and one.label.startswith("base-")
        assert len(two.tensors) == (2 if transfer is Transfer.TENSORS else 0)
        assert two.stale_hits == 0 and not two.updating and two.paused is None
        assert [body["mode"] for body in two.seen("/pause_generation")] == ["retract"] * 2


async def test_requests_under_way_finish_before_a_whole_model_is_replaced() -> None:
    async with serving(stub := Stub(), drain=60.0) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        stub.go.clear()
        task = asyncio.create_task(engine.generate(request(under=version("ann", 1))))
        await until(lambda: stub.running)
        load = asyncio.create_task(engine.load(version("ann", 2), whole_model(2)))
        await until(lambda: states(engine) == [State.JOINING])
        stub.go.set()
        assert (await task).version == version("ann", 1)
        await load


async def test_a_request_that_a_new_model_overtook_is_refused_and_nothing_is_aborted() -> None:
    async with serving(stub := Stub(replies=[[7] * 7 + [2]]), drain=0.0) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        stub.go.clear()
        stub.tokens_before_go = 3
        tasks = [
            asyncio.create_task(engine.generate(request([5, n], version("ann", 1), max_tokens=FULL))) for n in range(4)
        ]
        await until(lambda: len(stub.running) == 4)
        await engine.load(version("ann", 2), whole_model(2))
        stub.go.set()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(answer, EngineError)
            assert re.search(
                "ann@1 was replaced before it had answered.*of 8 tokens .* 5 from 'ann@v000002", str(answer)
            )
        assert not stub.aborted and stub.stale_hits == 0
        assert (await engine.generate(request(under=version("ann", 2)))).ids


async def test_a_cache_that_is_busy_is_asked_again_with_pauses() -> None:
    async with serving(stub := Stub()) as engine:
        stub.faults.flush_fails = 5
        await engine.load(version("ann", 1), whole_model(1))
        assert len(stub.seen("/flush_cache")) == 6
        assert (await engine.generate(request(under=version("ann", 1)))).ids


async def test_a_cache_that_is_never_empty_leaves_the_old_version_in_service() -> None:
    async with serving(stub := Stub(), flushes=3) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        stub.faults.flush_fails = 99
        with pytest.raises(EngineError, match="did not empty its cache in 3 attempts; 0 requests are pending"):
            await engine.load(version("ann", 2), whole_model(2))
        assert (await engine.generate(request(under=version("ann", 1)))).version == version("ann", 1)
        assert stub.label.startswith("ann@v000001-") and stub.paused is None
        with pytest.raises(EngineError, match="not loaded"):
            await engine.generate(request(under=version("ann", 2)))


@pytest.mark.parametrize("fault", ["refuse_update", "forget_label"])
async def test_a_server_that_missed_an_update_is_out_of_routing_until_it_has_it(fault: str) -> None:
    async with serving(one := Stub(replies=[[7, 2]]), two := Stub(replies=[[8, 2]]), full_replicas=2) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        setattr(two.faults, fault, 1)
        await engine.load(version("ann", 2), whole_model(2))
        answer = await engine.generate(request(under=version("ann", 2)))
        assert answer.ids == [7, 2] or two.label.startswith("ann@v000002-")
        await until(lambda: states(engine) == [SERVING, SERVING])
        assert one.label == two.label != "default"


async def test_whole_models_need_servers_of_their_own() -> None:
    async with serving(Stub(), Stub()) as engine:
        await engine.load(version("lora"), adapter())
        await engine.load(version("ann", 1), whole_model(1))
        with pytest.raises(
            EngineError, match="needs 1 servers of its own; 1 of 2 serve the base model, which 1 adapters need"
        ):
            await engine.load(version("bob", 1), whole_model(2))
        assert (await engine.generate(request(under=version("lora")))).ids


async def test_an_adapter_without_a_server_of_the_base_model_is_refused() -> None:
    async with serving(Stub()) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        with pytest.raises(EngineError, match="all 1 belong to policies with full weights"):
            await engine.load(version("lora"), adapter())
        with pytest.raises(EngineError, match="needs a server of the base model"):
            await engine.generate(request())


async def test_servers_get_the_base_model_back_when_nobody_needs_the_policy() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        await engine.unload(version("ann", 1))
        await until(lambda: states(engine) == [SERVING] and stub.model_path == "/models/base")
        assert (await engine.generate(request())).ids
        await engine.load(version("lora"), adapter())


async def test_a_server_of_a_policy_that_was_started_again_gets_its_weights_again() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann", 1), whole_model(1))
        await stub.start_again()
        answer = await engine.generate(request(under=version("ann", 1)))
        assert answer.version == version("ann", 1) and stub.label.startswith("ann@v000001-")


async def test_an_older_whole_model_does_not_replace_a_newer_one() -> None:
    async with serving(stub := Stub()) as engine:
        await engine.load(version("ann", 2), whole_model(2))
        await engine.load(version("ann", 1), whole_model(1))
        assert stub.label.startswith("ann@v000002-")
        with pytest.raises(EngineError, match="not loaded"):
            await engine.generate(request(under=version("ann", 1)))
