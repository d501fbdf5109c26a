"""The pages of a coordinator: health, metrics, status."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette

from coordinator.app.bounded import SNAPSHOT
from coordinator.app.daemon import Daemon
from coordinator.web.metrics import Metrics
from coordinator.web.pages import pages, served


def application(daemon: Daemon) -> Starlette:
    """All pages. From now on the daemon's barriers are counted."""

    def unready() -> str:
        if daemon.core.draining:
            return f"draining: {daemon.core.draining}"
        if daemon.stuck:
            return f"nothing goes on: {daemon.stuck}"
        return "" if daemon.serving else "not serving yet"

    metrics = Metrics(daemon, daemon.look)
    daemon.on_opened = metrics.opened
    return pages(unready, metrics.text, {"/status.json": lambda: SNAPSHOT.dump_json(daemon.look())})


def serving(daemon: Daemon, listening: socket.socket) -> AbstractAsyncContextManager[str]:
    """Serve while the block runs; gives the URL."""
    return served(application(daemon), listening)
