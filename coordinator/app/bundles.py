"""The host's end of the data plane: where its batches go and published adapters come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinker.engines.engine import Files
from tinker.protocol.to_host import Admitted
from tinker.protocol.values import BlobRef
from tinker.runtime.bulk import BulkClient, BundleStore


@dataclass(frozen=True, slots=True)
class HostBundles:
    """The host's data plane: by file on the task server's machine, else over its data connection."""

    admitted: Admitted
    store: BundleStore
    bulk: BulkClient

    async def put(self, name: str, files: Files) -> BlobRef:
        if self.admitted.machine == self.store.machine:
            return self.store.put(name, files)
        return await self.bulk.push(self.admitted.data, name, files)

    async def get(self, ref: BlobRef) -> Mapping[str, bytes]:
        return await self.bulk.fetch(ref)

    def drop(self, ref: BlobRef) -> None:
        self.store.remove(ref.name)
