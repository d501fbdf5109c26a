"""Bring a server up to what its place asks for: the right base weights under their label, and every adapter that is served."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import structlog

from tinker.engines.sglang.adapters import tidy
from tinker.engines.sglang.api import ServerFault
from tinker.engines.sglang.registry import Registry
from tinker.engines.sglang.replica import Replica, State
from tinker.engines.sglang.weights import put_weights
from tinker.protocol.values import BASE, PolicyName

STARTED = "started-"  # what the label of a server of our own begins with until it serves
APART = 0.25  # mean difference of logprobs, in nats, from which on two models are not the same one
log = structlog.get_logger("sglang")


class Unsuitable(ServerFault):
    """This server cannot serve this model: an operator must act."""


async def bring_up(registry: Registry, replica: Replica, probe: tuple[Sequence[int], Sequence[float]] | None) -> None:
    """When it returns the server serves. ServerFault if it would not have it. `probe`: ids and their logprobs under the base model."""
    replica.facts = facts = await replica.address.facts()
    if replica.base == BASE:
        replica.model_path = facts.model_path
    if facts.adapters and facts.batch_adapters < 2:
        raise Unsuitable(
            f"{replica.name} runs {facts.batch_adapters} adapters at once and the base model counts as one: start it with "
            "--max-loras-per-batch 2 or more"
        )
    if not facts.adapters and registry.adapters:
        raise Unsuitable(f"{replica.name} serves no adapters: start it with --enable-lora")
    await _settle_weights(registry, replica, facts.label)
    if probe is not None and replica.base == BASE:
        await _check_model(replica, *probe)
    ours = {held.name: held.version for held in registry.adapters}
    replica.leftover = ({*replica.held.values()} | replica.leftover) & set(facts.loaded) - set(ours)
    replica.held = {ours[name]: name for name in facts.loaded if name in ours}
    await tidy(replica)
    while missing := [each for each in registry.adapters if each.version not in replica.held and replica.owner == ""]:
        await registry.give(replica, missing[0])
    replica.state, replica.reason, replica.fenced = State.SERVING, "", anyio.Event()
    for held in registry.held.values():
        held.accepted |= replica.serves(held.version)
    log.info("replica serves", replica=replica.name, adapters=len(replica.held), weights=replica.label)
    registry.fleet.tell()


async def _settle_weights(registry: Registry, replica: Replica, told: str) -> None:
    """Its base weights are those of its owner and are called so; `told`: what it calls them now."""
    wanted = registry.weights_of(replica.owner)
    if wanted is registry.base:
        replica.owner = PolicyName("")
    if told != wanted.name:
        if wanted is not registry.base:
            await put_weights(replica, str(wanted.directory), wanted.name, registry.settings, registry.by_file(replica))
        elif told == "default" or told.startswith(STARTED):
            await replica.address.name_weights(wanted.name)
        elif replica.base != BASE:  # we put those there; its own path has the base model
            await put_weights(replica, replica.model_path, wanted.name, registry.settings, by_file=True)
        else:
            raise Unsuitable(
                f"{replica.name} serves weights called {told!r}, expected the base model ('default' or {wanted.name!r}): start it anew"
            )
    replica.label, replica.base = wanted.name, wanted.version


async def _check_model(replica: Replica, ids: Sequence[int], expected: Sequence[float]) -> None:
    """Unsuitable unless it gives these ids the logprobs that our own copy of the model gives them."""
    found = await replica.address.score(ids)
    apart = math.fsum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(expected)
    if not apart < APART:
        raise Unsuitable(
            f"{replica.name} is {apart:.2f} nats per token away from the model that is trained here (at most {APART} is the same model): "
            "start it with the same model"
        )
