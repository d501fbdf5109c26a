"""The engine on a real SGLang server: what it serves is what transformers and PEFT compute, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tinker.engines.conformance import (
    ADAM,
    CHECKS,
    LOSS,
    forgetting_changes_no_answer,
    request,
    row,
    the_same_seed_gives_the_same_answer,
    version,
)
from tests.tinker.engines.sglang_fixtures import states, until
from tinker.engines.engine import Engine, EngineError, Files, Generation
from tinker.engines.sglang import Servers, SglangEngine, Transfer
from tinker.engines.sglang.replica import State
from tinker.engines.torch import TorchEngine
from tinker.models import DEMO
from tinker.protocol.values import BASE, LoraSpec, PolicyName, PolicyVersion

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(1000),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CLOSE = 1e-4  # nats
SEEDED = (the_same_seed_gives_the_same_answer, forgetting_changes_no_answer)
PROMPT = [5, 6, 7, 30, 31]


async def trained(engine: Engine, policy: str, seed: int, steps: int = 3) -> Files:
    """An adapter that changes what the model says, published by the update half."""
    name = PolicyName(policy)
    files = await engine.attach(name, LoraSpec(seed=seed))
    for _ in range(steps):
        await engine.forward_backward(name, [row([5 + seed, 6, 40, 41, 42, 43], 4)], LOSS)
        await engine.optim_step(name, ADAM)
        files = await engine.publish(name)
    await engine.detach(name)
    return files


def reference(directory: Path, adapter: Files | None, tmp_path: Path) -> torch.nn.Module:
    """The same by transformers and PEFT."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        tmp_path.mkdir(exist_ok=True)
        for name, data in adapter.items():
            (tmp_path / name).write_bytes(data)
        model = PeftModel.from_pretrained(model, str(tmp_path))
    return model.eval()  # type: ignore[no-any-return]


@torch.inference_mode()
def furthest(model: torch.nn.Module, prompt: Sequence[int], answer: Generation, temperature: float) -> float:
    """The largest difference between an answer's logprobs and the model's."""
    logits = model(torch.tensor([[*prompt, *answer.ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    expected = logprobs.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    return float((expected - torch.tensor(answer.logprobs)).abs().max())


async def test_a_mixed_batch_of_base_and_two_adapters_is_what_transformers_and_peft_say(
    engine: SglangEngine, tmp_path: Path
) -> None:
    files: dict[PolicyVersion, Files | None] = {BASE: None}
    for seed, policy in enumerate(("ann", "bob"), start=1):
        files[version(policy, 1)] = await trained(engine, policy, seed)
        await engine.load(version(policy, 1), files[version(policy, 1)] or {})
    models = {each: reference(DEMO, adapter, tmp_path / str(each)) for each, adapter in files.items()}
    asked = [
        (each, temperature, [*PROMPT, 20 + n]) for n in range(6) for each in files for temperature in (0.0, 0.7, 1.0)
    ]
    answers = await asyncio.gather(
        *(
            engine.generate(request(prompt, each, key=str(n), max_tokens=12, temperature=temperature))
            for n, (each, temperature, prompt) in enumerate(asked)
        )
    )
    assert [answer.version for answer in answers] == [each for each, _, _ in asked]
    worst = max(
        furthest(models[each], prompt, answer, temperature)
        for (each, temperature, prompt), answer in zip(asked, answers, strict=True)
    )
    print(f"largest difference of {sum(len(answer.ids) for answer in answers)} logprobs: {worst:.1e}")
    assert worst < CLOSE
    greedy = {
        each: answer.ids for (each, t, prompt), answer in zip(asked, answers, strict=True) if not t and prompt[-1] == 20
    }
    assert len({tuple(ids) for ids in greedy.values()}) > 1  # the adapters do something
    for each in (version("ann", 1), version("bob", 1)):
        await engine.unload(each)


async def test_publishing_while_others_generate_serves_every_version_as_it_is(
    engine: SglangEngine, tmp_path: Path
) -> None:
    name, newest, answers = PolicyName("cat"), 0, list[tuple[PolicyVersion, list[int], Generation]]()
    published = {0: await engine.attach(name, LoraSpec(seed=3))}
    await engine.load(version("cat", 0), published[0])

    async def publish() -> None:
        nonlocal newest
        for number in range(1, 6):
            await engine.forward_backward(name, [row([5, 6, 40, 41, 42], 3)], LOSS)
            await engine.optim_step(name, ADAM)
            published[number] = await engine.publish(name)
            await engine.load(version("cat", number), published[number])
            newest = number
            await engine.unload(version("cat", number - 2))

    async def client(n: int) -> None:
        while newest < 5:
            wanted, prompt = version("cat", newest), [*PROMPT, 20 + n]
            answers.append((wanted, prompt, await engine.generate(request(prompt, wanted, key=str(n), max_tokens=8))))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        for n in range(4):
            tasks.create_task(client(n))
    await engine.detach(name)
    assert all(answer.version == wanted for wanted, _, answer in answers)
    for number in {wanted.version for wanted, _, _ in answers}:
        model = reference(DEMO, published[number], tmp_path / str(number))
        mine = [each for each in answers if each[0].version == number]
        assert max(furthest(model, prompt, answer, 1.0) for _, prompt, answer in mine) < CLOSE
    await until(lambda: [each.version for each in engine.replicas[0].held if each.policy == name] == [4, 5])
    for number in (4, 5):
        await engine.unload(version("cat", number))


async def test_an_adapter_over_the_wire_is_the_same_adapter(engine: SglangEngine, tmp_path: Path) -> None:
    files = await trained(engine, "dan", 4)
    servers = Servers((engine.replicas[0].address.url,), transfer=Transfer.TENSORS)
    async with SglangEngine(servers, TorchEngine(str(DEMO))) as other:
        await other.load(version("dan", 1), files)
        answer = await other.generate(request(PROMPT, version("dan", 1), max_tokens=16))
    assert furthest(reference(DEMO, files, tmp_path), PROMPT, answer, 1.0) < CLOSE


async def test_ids_that_would_kill_the_server_never_reach_it(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="another tokenizer"):
        await engine.generate(request([engine.card.vocab]))
    assert (await engine.generate(request())).ids


async def test_a_cancelled_request_stops_at_the_server(engine: SglangEngine) -> None:
    """Else the adapter would stay in use, and the unload would wait for a thousand tokens."""
    await engine.load(version("eve"), await trained(engine, "eve", 5))
    long = request(PROMPT, version("eve"), max_tokens=1000, temperature=1.7)
    task = asyncio.create_task(engine.generate(long))
    await until(lambda: engine.replicas[0].in_flight)
    await asyncio.sleep(0.1)  # the server has begun
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.unload(version("eve"))
    await until(lambda: version("eve") not in engine.replicas[0].held and not engine._registry.retiring)


@pytest.mark.parametrize("transfer", [Transfer.FILES, Transfer.TENSORS])
async def test_a_whole_model_replaces_the_base_and_gives_it_back(
    engine: SglangEngine, tmp_path: Path, transfer: Transfer
) -> None:
    directory = tmp_path / "model"
    changed = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.05)
    changed.save_pretrained(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()} | {
        path.name: path.read_bytes() for path in DEMO.glob("tokenizer*")
    }
    servers = Servers((engine.replicas[0].address.url,), transfer=transfer, drain=0.0)
    async with SglangEngine(servers, TorchEngine(str(DEMO))) as other:
        warm = await other.generate(request(PROMPT, max_tokens=4, temperature=0.0))  # now the prompt is cached
        await other.load(version("fay", 1), files)
        answer = await other.generate(request(PROMPT, version("fay", 1), max_tokens=16))
        assert furthest(reference(directory, None, tmp_path), PROMPT, answer, 1.0) < CLOSE
        under_way = [
            asyncio.create_task(
                other.generate(request([*PROMPT, n], version("fay", 1), max_tokens=900, temperature=1.7, stop_ids=()))
            )
            for n in range(20, 24)
        ]
        await until(lambda: other.replicas[0].in_flight == 4)
        await asyncio.sleep(0.3)  # some tokens are there
        await other.load(version("fay", 2), {**files, "config.json": files["config.json"] + b"\n"})
        for outcome in await asyncio.gather(*under_way, return_exceptions=True):
            finished = isinstance(outcome, Generation) and outcome.version == version("fay", 1)
            assert finished or (isinstance(outcome, EngineError) and "was replaced before" in str(outcome))
    await until(lambda: states(engine) == [State.SERVING] and engine.replicas[0].label.startswith("base-"))
    again = await engine.generate(request(PROMPT, max_tokens=4, temperature=0.0))
    assert again.ids == warm.ids and again.logprobs == pytest.approx(warm.logprobs, abs=CLOSE)


@pytest.mark.parametrize(
    "check",
    [each for each in CHECKS if each not in SEEDED],
    ids=lambda check: check.__name__,
)
async def test_the_conformance_suite(engine: SglangEngine, check: Callable[[Engine], Awaitable[None]]) -> None:
    """All but those that need it: SGLang does not sample by our seeds."""
    servers = Servers((engine.replicas[0].address.url,))
    async with SglangEngine(servers, TorchEngine(str(DEMO), max_context=engine.card.context)) as other:
        await check(other)


async def test_a_whole_run_trains_on_no_token_of_another_version(engine: SglangEngine, tmp_path: Path) -> None:
    """The command, with all its processes. Every trained token is scored again by the update half: a foreign one would stand out."""
    url = engine.replicas[0].address.url
    words = [
        "-m",
        "coordinator.cli.main",
        "run",
        "guess",
        "--rounds",
        "3",
        "--rollout",
        "sglang",
        "--out",
        str(tmp_path / "run"),
    ]
    words += ["--set", f'rollout.url=["{url}"]', "--set", "evaluate_every=0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [each["logprob_gap_max"] for each in rows if each.get("tokens_trained")]
    assert len(gaps) >= 4 and max(gaps) < CLOSE
    assert sum(each.get("count/missing_logprobs", 0) for each in rows) == 0


async def test_a_server_that_is_killed_is_started_again_and_answers_as_before(
    engine: SglangEngine, tmp_path: Path
) -> None:
    files = await trained(engine, "gus", 7)
    await engine.load(version("gus", 1), files)
    model = reference(DEMO, files, tmp_path)
    servers = [
        each for each in psutil.Process().children(recursive=True) if "cpu_server.py" in " ".join(each.cmdline())
    ]
    server = next(each for each in servers if "warden.py" not in " ".join(each.cmdline()))
    everything = [server, *server.children(recursive=True)]
    tasks = [
        asyncio.create_task(engine.generate(request([*PROMPT, n], version("gus", 1), max_tokens=200, temperature=1.7)))
        for n in range(20, 24)
    ]
    await until(lambda: engine.replicas[0].in_flight == 4)
    os.kill(server.pid, signal.SIGKILL)
    for n, task in enumerate(tasks, start=20):
        answer = await task
        assert answer.version == version("gus", 1)
        assert furthest(model, [*PROMPT, n], answer, 1.7) < CLOSE
    assert not [each for each in everything if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
