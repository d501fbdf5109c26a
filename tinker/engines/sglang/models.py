"""A policy with full weights has servers of its own: each of its versions replaces the one before in all of them.

A server holds one whole model, so what was served before is served no more: requests for it are refused, those under way finish first
(within the `drain` time) or are refused when they turn out to be a mixture. A server that missed an update is out of routing.
"""

from __future__ import annotations

from contextlib import suppress

import anyio
import structlog

from tinker.engines.engine import EngineError
from tinker.engines.sglang.api import ServerFault
from tinker.engines.sglang.registry import Held, Registry
from tinker.engines.sglang.replica import Replica, State
from tinker.engines.sglang.weights import put_weights
from tinker.protocol.values import PolicyName

log = structlog.get_logger("sglang")


async def replace(registry: Registry, held: Held) -> None:
    """Returns when it is served. EngineError if no server took it: then what was served before is served on."""
    policy = held.version.policy
    before = registry.weights_of(policy)
    if before is not registry.base and before.version > held.version:
        log.warning("superseded", version=str(held.version), by=str(before.version))
        registry.drop(held)
        return
    replicas = _servers(registry, held)
    for replica in replicas:
        replica.state, replica.reason = State.JOINING, f"it is given {held.version}"
    with anyio.move_on_after(registry.settings.drain):
        while any(replica.in_flight for replica in replicas):
            await registry.fleet.changed()
    faults: dict[Replica, ServerFault] = {}
    async with anyio.create_task_group() as tasks:
        for replica in replicas:
            tasks.start_soon(_update, registry, replica, held, faults)
    if len(faults) < len(replicas):
        _served(registry, held, before)
    for replica in replicas:
        replica.state, replica.reason = State.SERVING, ""
        if replica in faults and (held.accepted or not replica.label):
            registry.fleet.fence(replica, f"it missed the update to {held.version}: {faults[replica]}")
    registry.fleet.tell()
    if not held.accepted:
        told = "; ".join(f"{replica.name}: {fault}" for replica, fault in faults.items())
        raise EngineError(f"no server took {held.version}; what they served before is served on: {told}")


def give_back(registry: Registry, held: Held) -> None:
    """Nobody needs this policy's weights any more: its servers get the base model back."""
    for replica in registry.fleet.replicas:
        if replica.owner == held.version.policy and registry.weights_of(replica.owner) is registry.base:
            replica.owner = PolicyName("")
            registry.fleet.fence(replica, "it gets the base model back")


async def restore(registry: Registry) -> None:
    """Servers of policies get the base model back now, as far as they can be reached."""
    for replica in registry.fleet.serving:
        if replica.owner:
            with suppress(ServerFault):
                await put_weights(replica, replica.model_path, registry.base.name, registry.settings, by_file=True)


def _served(registry: Registry, held: Held, before: Held) -> None:
    registry.held[held.version] = held
    held.accepted = True
    if before is not registry.base:
        del registry.held[before.version]
        registry.drop(before)


async def _update(registry: Registry, replica: Replica, held: Held, faults: dict[Replica, ServerFault]) -> None:
    try:
        await put_weights(replica, str(held.directory), held.name, registry.settings, registry.by_file(replica))
    except ServerFault as fault:
        faults[replica] = fault
    else:
        replica.base, replica.owner = held.version, held.version.policy


def _servers(registry: Registry, held: Held) -> list[Replica]:
    """The policy's own; else some that serve the base model only. EngineError, with the numbers, if there are too few."""
    policy, fleet = held.version.policy, registry.fleet
    own = [each for each in fleet.replicas if each.owner == policy]
    up = [each for each in own if each.state is State.SERVING]
    if own and not up:
        raise EngineError(f"no server of {policy} is up: {fleet.story()}")
    if up:
        return up
    free = [each for each in reversed(fleet.serving) if each.owner == ""]
    wanted, adapters = registry.settings.full_replicas, len(registry.adapters)
    if len(free) - bool(adapters) < wanted:
        raise EngineError(
            f"{held.version} is a whole model and needs {wanted} servers of its own; {len(free)} of {len(fleet.replicas)} serve the base "
            f"model, which {adapters} adapters need: start more replicas"
        )
    for replica in free[:wanted]:
        replica.leftover |= {*replica.held.values()}
        replica.held.clear()
    return free[:wanted]
