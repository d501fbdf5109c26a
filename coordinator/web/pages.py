"""Pages over HTTP: on loopback, in a daemon's own event loop, read only.

A request is answered between two bursts of messages, from what there is. The server handles no signals, and when the daemon stops it is
gone within `CLOSING` seconds, whoever is still connected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tinker.runtime.transport import AddressInUse, TransportError

CLOSING = 1  # seconds for answers that are being sent when the daemon stops


def pages(
    unready: Callable[[], str], scrape: Callable[[], bytes], more: Mapping[str, Callable[[], bytes]]
) -> Starlette:
    """The pages of a daemon. `unready`: why nothing new begins here ("": it does); `scrape`: its metrics; `more`: paths with JSON."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        why = unready()
        return PlainTextResponse(f"{why}\n", 503) if why else PlainTextResponse("ready\n")

    async def metrics(_: Request) -> Response:
        return Response(scrape(), media_type=CONTENT_TYPE_LATEST)

    async def json(request: Request) -> Response:
        return Response(more[request.url.path](), media_type="application/json")

    routes = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        *(Route(path, json) for path in more),
    ]
    # A page in a browser of this machine must not read us under a name of its own.
    hosts = ["localhost", "127.0.0.1", "[::1]", "::1"]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


def bound(address: str) -> socket.socket:
    """A socket at HOST:PORT (port 0: any free one). AddressInUse, or TransportError if it is no address."""
    parts = urlsplit(f"http://{address}")
    try:
        host, port = ipaddress.ip_address((parts.hostname or "").replace("localhost", "127.0.0.1")), parts.port
    except ValueError:
        port = None
    if port is None:
        raise TransportError(f"cannot serve HTTP at {address!r}; expected something like 127.0.0.1:7655")
    family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that asyncio sets TCP_NODELAY
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((str(host), port))
        found.listen()
    except OSError as error:
        found.close()
        raise AddressInUse(
            f"cannot serve HTTP at {address}: {error.strerror}; choose another port (0 takes any free one)"
        ) from error
    return found


@asynccontextmanager
async def served(pages: Starlette, listening: socket.socket) -> AsyncIterator[str]:
    """Serve while the block runs; gives the URL."""
    config = uvicorn.Config(
        pages,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSING,
    )
    server = _Server(config)
    host, port = listening.getsockname()[:2]

    async def serve() -> None:
        with anyio.CancelScope(shield=True):  # cancelled it would not close its connections; it ends when it is told to
            await server.serve([listening])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, name="http")
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.should_exit = True


class _Server(uvicorn.Server):
    """Signals belong to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
