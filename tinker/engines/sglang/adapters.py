"""An adapter on every server of the base model: offered to all at once, served by whoever took it, let go of when nobody uses it.

A server that would not take what others hold is out of routing until it does. If nobody takes it, and somebody said why, the adapter is
at fault and nothing has changed; if nobody could be asked, we wait for a server.
"""

from __future__ import annotations

from contextlib import suppress

import anyio
import structlog

from tinker.engines.engine import EngineError
from tinker.engines.sglang.api import Rejected, ServerFault
from tinker.engines.sglang.registry import Held, Registry, adapter_payload
from tinker.engines.sglang.replica import Replica, State

log = structlog.get_logger("sglang")


async def spread(registry: Registry, held: Held) -> None:
    """Returns when it is served. EngineError if there is no room for it, or no server takes it."""
    fleet = registry.fleet
    await _make_room(registry, held)
    payload = None
    if any(not registry.by_file(each) for each in fleet.serving):
        payload = await anyio.to_thread.run_sync(adapter_payload, held.directory)
    registry.held[held.version] = held  # from here on a server that joins gets it, too
    while not held.accepted:
        registry.check_place(held)
        todo = [each for each in fleet.serving if each.owner == "" and held.version not in each.held]
        async with anyio.create_task_group() as tasks:
            for replica in todo:
                tasks.start_soon(_offer, registry, replica, held, payload)
        held.accepted = any(each.serves(held.version) for each in fleet.replicas)
        if not held.accepted:
            await _nobody_took(registry, held)
    for replica, fault in held.refused.items():
        fleet.fence(replica, f"it would not load {held.version}, which others hold: {fault}")
    held.refused.clear()
    fleet.tell()


async def retire(registry: Registry, held: Held) -> None:
    """Nobody uses it any more: every server may forget it. What one will not forget is tried again later (`tidy`)."""
    for replica in registry.fleet.replicas:
        name = replica.held.pop(held.version, None)
        if name is None or replica.state is State.GONE:
            continue
        try:
            await replica.address.unload_adapter(name)
        except ServerFault as fault:
            replica.leftover.add(name)
            log.warning("not unloaded", replica=replica.name, version=str(held.version), reason=str(fault))


async def tidy(replica: Replica) -> None:
    """Try again to unload what it would not unload."""
    for name in sorted(replica.leftover):
        with suppress(ServerFault):
            await replica.address.unload_adapter(name)
            replica.leftover.discard(name)


async def _offer(registry: Registry, replica: Replica, held: Held, payload: bytes | None) -> None:
    with suppress(ServerFault):  # `refused` has it
        await registry.give(replica, held, payload)


async def _nobody_took(registry: Registry, held: Held) -> None:
    """Raise if somebody said why; else wait until there is somebody to ask."""
    meant = [str(fault) for fault in held.refused.values() if isinstance(fault, Rejected)]
    for replica, fault in held.refused.items():
        if not isinstance(fault, Rejected):
            registry.fleet.fence(replica, str(fault))
    if meant:
        raise EngineError(f"no server takes {held.version}: {'; '.join(meant)}")
    held.refused.clear()
    if not registry.fleet.serving:
        await registry.fleet.changed()


async def _make_room(registry: Registry, held: Held) -> None:
    """Wait for versions that are going; EngineError if all places are taken by others."""
    fleet = registry.fleet
    free = [
        each.facts.adapters - len(set(each.facts.loaded) - {*each.held.values(), *each.leftover})
        for each in fleet.replicas
        if each.facts and each.owner == "" and each.state is not State.GONE
    ]
    limit = min(free, default=1)
    with anyio.move_on_after(registry.settings.drain):
        while len(registry.adapters) + len(registry.retiring) >= limit and registry.retiring:
            await fleet.changed()
    if len(registry.adapters) >= limit:
        raise EngineError(
            f"{held.version} finds no place: {len(registry.adapters)} adapters are served and the servers hold {limit} at most; unload a "
            "version, or start them with more --max-loaded-loras"
        )
