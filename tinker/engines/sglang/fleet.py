"""Which server gets a request: the one that had this seat's last one (its cache is warm), else the one with the fewest under way.

Only servers that hold the version are asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import structlog

from tinker.engines.sglang.replica import Replica, State
from tinker.protocol.values import PolicyVersion

REMEMBERED = 65536  # seats whose server is remembered
log = structlog.get_logger("sglang")


class Fleet:
    """All replicas, and a bell for whoever waits for something about them to change."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self._last: OrderedDict[str, Replica] = OrderedDict()
        self._changed = anyio.Event()

    @property
    def serving(self) -> list[Replica]:
        return [each for each in self.replicas if each.state is State.SERVING]

    def pick(self, version: PolicyVersion, cache_key: str) -> Replica | None:
        """The replica for one request, or None: nobody serves the version now."""
        able = [each for each in self.replicas if each.serves(version)]
        if able:
            return self._chosen(able, cache_key)
        return None

    @contextmanager
    def running(self, replica: Replica, version: PolicyVersion) -> Iterator[None]:
        """Count one request under way there."""
        replica.running[version] += 1
        try:
            yield
        finally:
            replica.running[version] -= 1
            if not replica.running[version]:
                del replica.running[version]
            self.tell()

    def fence(self, replica: Replica, reason: str) -> None:
        """Take it out of routing, and say so."""
        if replica.fence(reason):
            log.warning("replica out of routing", replica=replica.name, reason=reason)
            self.tell()

    def forget(self, cache_key_prefix: str) -> None:
        """These seats are gone."""
        for key in [key for key in self._last if key.startswith(cache_key_prefix)]:
            del self._last[key]

    def tell(self) -> None:
        """Wake whoever waits for something to have changed."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Until the next `tell`."""
        await self._changed.wait()

    def story(self) -> str:
        """Every replica and why it is as it is."""
        return "; ".join(f"{each.name} is {each.state}: {each.reason}" for each in self.replicas)

    def _chosen(self, able: Sequence[Replica], cache_key: str) -> Replica:
        last = self._last.get(cache_key)
        chosen = last if last in able else min(able, key=lambda each: (each.in_flight, each.number))
        assert chosen is not None
        self._last[cache_key] = chosen
        self._last.move_to_end(cache_key)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return chosen
