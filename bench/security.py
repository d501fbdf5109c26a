"""What keys cost: a connection until its first answer, and frames of 1 KiB, with and without CURVE, interleaved; prints markdown.

Both ends are in this process: the ratio is of both ends together.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from tinker.runtime.transport import Disconnected, PublicKey, Security, ZmqTransport, new_keys

SHAKES, FRAMES, TIMES = 50, 5000, 5


class Everybody:
    def admit(self, key: PublicKey) -> str | None:
        return key


async def measure(transport: ZmqTransport) -> tuple[float, float, float]:
    """Milliseconds until the first answer, microseconds per frame, microseconds of CPU per frame."""
    listener = transport.listen("tcp://127.0.0.1:0")

    async def echo() -> None:
        while True:
            for arrival in await listener.receive_many():
                if not isinstance(arrival, Disconnected):
                    listener.send(*arrival)

    task = asyncio.create_task(echo())
    first = []
    for _ in range(SHAKES):
        began = time.perf_counter()
        connection = transport.connect(listener.address)
        connection.send(b"x")
        await connection.receive()
        first.append(time.perf_counter() - began)
        await connection.aclose()
    connection = transport.connect(listener.address)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(FRAMES // 100):
        for _ in range(100):
            connection.send(bytes(1024))
        left = 100
        while left:
            left -= len(await connection.receive_many())
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    await connection.aclose()
    task.cancel()
    await listener.aclose()
    return statistics.median(first) * 1e3, took / FRAMES * 1e6, cpu / FRAMES * 1e6


def main() -> None:
    keys = new_keys()
    kinds = {"plain": ZmqTransport(), "CURVE": ZmqTransport(Security(keys, Everybody()))}
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for _ in range(TIMES):
        for kind, transport in kinds.items():
            found[kind].append(asyncio.run(measure(transport)))
    print("| | connect to first answer, ms | 1 KiB there and back, us | CPU of both ends, us |\n|---|---|---|---|")
    for kind, rows in found.items():
        print(
            f"| {kind} | " + " | ".join(f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True)) + " |"
        )


if __name__ == "__main__":
    main()
