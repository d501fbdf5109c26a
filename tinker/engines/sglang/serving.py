"""The rollout half of the engine: versions on all servers, and answers from whichever holds them.

An answer counts only if every token of it is from what was asked for; otherwise the server is out of routing and another one is asked.
"""

from __future__ import annotations

from dataclasses import replace as changed_to

import anyio
import structlog
from anyio.abc import TaskGroup

from tinker.engines.checks import ADAPTER_CONFIG, check_files, digest_of, other_weights
from tinker.engines.engine import EngineError, Files
from tinker.engines.sglang import adapters, models
from tinker.engines.sglang.api import Aborted, Answer, Asked, Rejected, ServerFault, Unavailable, WrongVersion, new_rid
from tinker.engines.sglang.registry import Held, Registry
from tinker.engines.sglang.weights import MODEL_CONFIG
from tinker.protocol.values import BASE, PolicyVersion

GOODBYE = 20.0  # seconds for leaving servers as they were
WRONG_ANSWERS = 3  # until a request is given up
log = structlog.get_logger("sglang")


class Serving:
    """`tasks` runs what outlasts a call."""

    def __init__(self, registry: Registry, tasks: TaskGroup) -> None:
        self.registry = registry
        self._tasks = tasks
        self._order = anyio.Lock()
        self._open = 0

    async def load(self, version: PolicyVersion, files: Files) -> None:
        """Serve it on every server it belongs to. EngineError, and nothing has changed, if that cannot be."""
        registry = self.registry
        full = MODEL_CONFIG in files and ADAPTER_CONFIG not in files
        if not full:
            check_files(files)
        digest = await anyio.to_thread.run_sync(digest_of, files)
        async with self._order:
            known = registry.held.get(version)
            if known is not None and known.digest == digest:
                return
            if known is not None or not version.policy:
                raise other_weights(version)
            while any(each.version == version for each in registry.retiring):
                await registry.fleet.changed()
            held = await registry.keep(version, digest, files, full)
            try:
                await (models.replace(registry, held) if full else adapters.spread(registry, held))
            except BaseException:
                if registry.held.pop(version, None):
                    await self._withdraw(held)
                registry.drop(held)
                raise

    def unload(self, version: PolicyVersion) -> None:
        """Refuse it from now on; the rest happens when its requests are answered. BASE stays, unknown ones are ignored."""
        held = self.registry.held.pop(version, None) if version != BASE else None
        if held is not None:
            self.registry.retiring.append(held)
            self._tasks.start_soon(self._retire, held, name=f"unload {version}")
            self.registry.fleet.tell()

    async def answer(self, version: PolicyVersion, cache_key: str, asked: Asked) -> Answer:
        """Asked until a server gives an answer that counts. EngineError if none will. `asked` needs no rid, adapter or label yet."""
        held = self.registry.find(version)
        held.open += 1
        self._open += 1
        try:
            return await self._answered(held, cache_key, asked)
        finally:
            held.open -= 1
            self._open -= 1
            self.registry.fleet.tell()

    async def close(self) -> None:
        """Whoever waits for an answer gets an EngineError; returns when they have it, and servers that live on have what they had before
        us."""
        self.registry.close()
        with anyio.move_on_after(GOODBYE, shield=True):
            while self._open:
                await self.registry.fleet.changed()
            for held in self.registry.adapters:
                await adapters.retire(self.registry, held)
            await models.restore(self.registry)

    async def _answered(self, held: Held, cache_key: str, asked: Asked) -> Answer:
        registry, fleet = self.registry, self.registry.fleet
        wrong: list[str] = []
        while len(wrong) < WRONG_ANSWERS:
            if held.full and registry.held.get(held.version) is not held:
                why = wrong[-1] if wrong else "its servers hold a newer one"
                raise EngineError(f"{held.version} was replaced before it had answered: {why}")
            registry.check_place(held)
            replica = fleet.pick(held.version, cache_key)
            if replica is None:
                await fleet.changed()
                continue
            label = replica.label
            one = changed_to(asked, rid=new_rid(), adapter=replica.held.get(held.version, ""), label=label)
            try:
                with fleet.running(replica, held.version), replica.asking():
                    return await replica.address.generate(one)
            except Rejected as refused:
                raise EngineError(f"{replica.name} refused the request: {refused}") from refused
            except Unavailable as fault:
                fleet.fence(replica, str(fault))
            except ServerFault as fault:
                wrong.append(f"{replica.name}: {fault}")
                log.warning("answer not used", replica=replica.name, version=str(held.version), reason=str(fault))
                ours = isinstance(fault, WrongVersion) and replica.label != label  # we changed its weights meanwhile
                if not ours and not isinstance(fault, Aborted):
                    fleet.fence(replica, str(fault))
        raise EngineError(f"no usable answer under {held.version} in {len(wrong)} attempts: {'; '.join(wrong)}")

    async def _retire(self, held: Held) -> None:
        while held.open:
            await self.registry.fleet.changed()
        if held.full:
            models.give_back(self.registry, held)
        else:
            await adapters.retire(self.registry, held)
        self.registry.drop(held)
        self.registry.retiring.remove(held)
        self.registry.fleet.tell()

    async def _withdraw(self, held: Held) -> None:
        """It was on its way to the servers and is not wanted now."""
        with anyio.CancelScope(shield=True):
            if not held.full:
                await adapters.retire(self.registry, held)
