"""The data plane: bundles of files move between machines in small pieces, on connections of their own, under credit.

On one machine nothing moves: a BlobRef's path is read. Elsewhere one connection carries one transfer. The receiver gives credit for WINDOW
chunks and for one more whenever it has dealt with one, so neither end ever holds more than that window in memory. The digest is checked
on arrival. A transfer that is interrupted, stalls, or is refused leaves nothing and ends with BulkError on the client.
"""

from tinker.runtime.bulk_client import BulkClient
from tinker.runtime.bulk_server import BulkServer
from tinker.runtime.bulk_stream import BULK_LIMITS
from tinker.runtime.bundles import BulkError, BundleCorrupt, BundleExists, BundleStore, StoreUnwritable, machine_id

__all__ = [
    "BULK_LIMITS",
    "BulkClient",
    "BulkError",
    "BulkServer",
    "BundleCorrupt",
    "BundleExists",
    "BundleStore",
    "StoreUnwritable",
    "machine_id",
]
