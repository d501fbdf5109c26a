"""The host's end of the data plane: where its batches go and published adapters come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinker.engines.engine import Files
from tinker.protocol.to_host import Admitted
from tinker.protocol.values import BlobRef
from tinker.runtime.bulk import BulkClient, BundleStore


@dataclass(frozen=True, slots=True)
class HostBundles:
    """The host's data plane: by file on the machine of the task server that updates, else over its data connection. `admitted`: where
    that is now."""

    admitted: Callable[[], Admitted]
    store: BundleStore
    bulk: BulkClient

    async def put(self, name: str, files: Files) -> BlobRef:
        where = self.admitted()
        if where.machine == self.store.machine:
            return self.store.put(name, files)
        return await self.bulk.push(where.data, name, files)

    async def get(self, ref: BlobRef) -> Mapping[str, bytes]:
        return await self.bulk.fetch(ref)

    def drop(self, ref: BlobRef) -> None:
        self.store.remove(ref.name)
