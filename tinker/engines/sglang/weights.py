"""Put a whole model into a server that runs: nobody generates meanwhile, and nothing cached under the old weights is used again.

Order: requests under way are put back (`pause`, mode retract), the cache is emptied, with longer and longer pauses while the server is too
busy for it, the weights are replaced under their label, the server goes on. If the cache cannot be emptied nothing has changed. Requests
that were put back go on under the new weights; their answers say so token by token, and whoever asked for one version refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import structlog

from tinker.engines.sglang import wire
from tinker.engines.sglang.api import ServerFault, Unavailable, WrongVersion
from tinker.engines.sglang.replica import Replica
from tinker.engines.sglang.settings import Servers

MODEL_CONFIG = "config.json"
LONGEST = 5.0  # seconds between two attempts to empty the cache
log = structlog.get_logger("sglang")


async def put_weights(replica: Replica, directory: str, label: str, settings: Servers, by_file: bool) -> None:
    """ServerFault if it did not work. `replica.label` is then still the old one, or "" if nobody knows what is in there now."""
    server = replica.address
    await server.pause()
    try:
        await empty_cache(replica, settings)
        if by_file:
            await server.update_from_disk(directory, label)
        else:
            await _send_tensors(replica, Path(directory), label, settings)
        told = await server.label()
        if told != label:
            replica.label = ""
            raise WrongVersion(f"{replica.name} calls its weights {told!r} after it was given {label!r}")
        replica.label = label
    finally:
        with anyio.CancelScope(shield=True):
            await server.resume()


async def empty_cache(replica: Replica, settings: Servers) -> None:
    """Unavailable, with what it waits for, if it never could."""
    wait = settings.pause
    for attempt in range(settings.flushes):
        if await replica.address.flush():
            return
        if attempt == 0:
            log.info("cache not empty yet", replica=replica.name, in_flight=replica.in_flight)
        await anyio.sleep(wait)
        wait = min(2 * wait, LONGEST)
    raise Unavailable(
        f"{replica.name} did not empty its cache in {settings.flushes} attempts; {replica.in_flight} requests are pending there"
    )


async def _send_tensors(replica: Replica, directory: Path, label: str, settings: Servers) -> None:
    """In buckets, so that no request holds the whole model."""
    server = replica.address
    await server.begin_update()
    replica.label = ""  # a mixture until the end
    with ExitStack() as files:
        buckets = wire.in_buckets(_tensors(directory, files), settings.bucket)
        while (payload := await anyio.to_thread.run_sync(_next, buckets)) is not None:
            await server.update_from_tensors(payload)
    await server.end_update()
    await server.name_weights(label)


def _tensors(directory: Path, files: ExitStack) -> Iterator[tuple[str, wire.RawTensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        yield from wire.read_safetensors(files.enter_context(path.open("rb")))


def _next(buckets: Iterator[list[tuple[str, wire.RawTensor]]]) -> bytes | None:
    bucket = next(buckets, None)
    return None if bucket is None else wire.pickled(bucket)


__all__ = ["MODEL_CONFIG", "ServerFault", "empty_cache", "put_weights"]
