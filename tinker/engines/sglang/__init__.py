"""The SGLang engine: answers come from SGLang servers over HTTP, updates and scores from an engine of this process.

`api`: what is said and what answers mean. `wire`: tensors as SGLang reads them. `server`: one server over HTTP. `replica`, `fleet`: what we
know of every server, and who gets a request. `serving`: versions on all of them. `weights`: whole models put into running servers.
`keeper`: join, watch, fence, join again. `launch`, `warden`: servers of our own. `cpu_server`: SGLang on a CPU, for trying and tests.
"""

from tinker.engines.sglang.engine import SglangEngine
from tinker.engines.sglang.settings import Launch, ServerKeys, Servers, Transfer

__all__ = ["Launch", "ServerKeys", "Servers", "SglangEngine", "Transfer"]
