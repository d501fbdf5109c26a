"""The pages of a coordinator: health, metrics, status."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from pydantic import TypeAdapter
from starlette.applications import Starlette

from coordinator.app.daemon import Daemon
from coordinator.app.snapshot import Snapshot, snapshot
from coordinator.web.metrics import Metrics
from coordinator.web.pages import pages, served

SNAPSHOT = TypeAdapter(Snapshot)


def application(daemon: Daemon) -> Starlette:
    """All pages. From now on the daemon's barriers are counted."""
    began = daemon.clock.now()

    def look() -> Snapshot:
        taken = snapshot(daemon.core, daemon.clock.now(), began)
        return replace(taken, counts=dict(sorted((daemon.core.counts + daemon.counts).items())))

    def unready() -> str:
        if daemon.core.draining:
            return f"draining: {daemon.core.draining}"
        if daemon.stuck:
            return f"nothing goes on: {daemon.stuck}"
        return "" if daemon.serving else "not serving yet"

    metrics = Metrics(daemon, look)
    daemon.on_opened = metrics.opened
    return pages(unready, metrics.text, {"/status.json": lambda: SNAPSHOT.dump_json(look())})


def serving(daemon: Daemon, listening: socket.socket) -> AbstractAsyncContextManager[str]:
    """Serve while the block runs; gives the URL."""
    return served(application(daemon), listening)
