"""The wire: every message as a frozen dataclass, grouped by who receives it. `VERSION` is the major version both ends must share."""

from tinker.protocol.operations import Operation, Result
from tinker.protocol.to_any import ToAny
from tinker.protocol.to_coordinator import ToCoordinator
from tinker.protocol.to_daemon import ToDaemon, ToWatcher
from tinker.protocol.to_host import ToHost
from tinker.protocol.to_taskserver import ToTaskserver

VERSION = 1
Message = ToAny | ToCoordinator | ToDaemon | ToWatcher | ToHost | ToTaskserver

__all__ = [
    "VERSION",
    "Message",
    "Operation",
    "Result",
    "ToAny",
    "ToCoordinator",
    "ToDaemon",
    "ToHost",
    "ToTaskserver",
    "ToWatcher",
]
