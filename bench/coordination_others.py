"""The same turn by actors of Ray and of xoscar, for `bench/coordination.py --others PYTHON` (an interpreter that has them; nothing else
here depends on them).

    python bench/coordination_others.py ray|xoscar JSON

The same three processes: a host that has 64 tables at once, a coordinator actor that asks a worker actor for each of two seats and answers
when both have answered, and the worker. Prompts (200 ids), answers (50 ids and logprobs) and the other fields are those of the real
messages, as plain Python values and packed bytes. The coordinator actor checks nothing, keeps nothing and fences nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

TABLES, PROMPT, ANSWER = 64, 200, 50
IDS, LOGPROBS = array("i", range(ANSWER)).tobytes(), array("f", [-1.5] * ANSWER).tobytes()
SAMPLING = (ANSWER, 1.0, 4711, ())


def answer(**measured: object) -> None:
    print(json.dumps(measured), flush=True)


def requests() -> list[tuple[object, ...]]:
    prompt = array("i", range(PROMPT)).tobytes()
    return [(seat, (f"policy{k:04}", 0), prompt, SAMPLING) for k, seat in enumerate(("first", "second"))]


class Worker:
    async def generate(self, turn: object, seat: str, policy: object, prompt: bytes, sampling: object) -> object:
        return turn, seat, IDS, LOGPROBS, "length", policy, 0.0, 0.0


async def serve(turn: Callable[[object, list[tuple[object, ...]]], Awaitable[Any]], pid: int) -> None:
    """As many turns at each table as each line says."""
    asked, played = requests(), 0

    async def table(index: int, count: int) -> None:
        for number in range(played, played + count):
            results = await turn(("turns", (1, "rollout", index), number), asked)
            assert len(results) == len(asked)

    answer(ready=pid)
    while line := await asyncio.to_thread(sys.stdin.readline):
        count, began = int(line), time.perf_counter()
        await asyncio.gather(*(table(index, count) for index in range(TABLES)))
        played += count
        answer(seconds=time.perf_counter() - began)


def with_ray() -> None:
    import ray

    class Coordinator:
        def __init__(self, worker: Any) -> None:
            self.worker = worker

        def pid(self) -> int:
            return os.getpid()

        async def turn(self, turn: object, requests: list[tuple[Any, ...]]) -> list[object]:
            return await asyncio.gather(*(self.worker.generate.remote(turn, *request) for request in requests))

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=10**8)
    worker = ray.remote(Worker).options(num_cpus=1, max_concurrency=1000).remote()
    coordinator = ray.remote(Coordinator).options(num_cpus=1, max_concurrency=1000).remote(worker)

    async def turn(turn: object, requests: list[tuple[object, ...]]) -> Any:
        return await coordinator.turn.remote(turn, requests)

    asyncio.run(serve(turn, ray.get(coordinator.pid.remote())))


async def with_xoscar() -> None:
    import xoscar as xo
    from xoscar.backends.allocate_strategy import ProcessIndex

    class ActorWorker(Worker, xo.StatelessActor):  # type: ignore[misc]
        pass

    class Coordinator(xo.StatelessActor):  # type: ignore[misc]
        def __init__(self, worker: Any) -> None:
            self.worker = worker

        async def pid(self) -> int:
            return os.getpid()

        async def turn(self, turn: object, requests: list[tuple[Any, ...]]) -> list[object]:
            return await asyncio.gather(*(self.worker.generate(turn, *request) for request in requests))

    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=2)
    async with pool:
        place = {"address": pool.external_address}
        worker = await xo.create_actor(ActorWorker, **place, allocate_strategy=ProcessIndex(2))
        coordinator = await xo.create_actor(Coordinator, worker, **place, allocate_strategy=ProcessIndex(1))
        await serve(coordinator.turn, await coordinator.pid())


if __name__ == "__main__":
    if sys.argv[1] == "ray":
        with_ray()
    else:
        asyncio.run(with_xoscar())
