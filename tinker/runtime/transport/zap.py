"""Answers ZeroMQ's question at every handshake: may this key in, and who is it?

ZeroMQ asks inside the context of the socket that listens, at inproc://zeromq.zap.01. Contexts are per socket here, so every protected
listener has a handler and a guard of its own, and two listeners of one process may let different people in. The handler is one task,
supervised by its listener: whatever ends it closes the listener. Until then ZeroMQ itself refuses everybody, because the socket names a
domain; so a handler that hangs or has gone lets nobody in. Nothing the peer says is decoded here but its 32-byte key.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import zmq

from tinker.runtime.transport.curve import public_text
from tinker.runtime.transport.security import Guard

WHERE = "inproc://zeromq.zap.01"
VERSION = b"1.0"
KEY_BYTES = 32


class ZapHandler:
    """Serves one context until it is closed. `on_failure` is called once if it ends in any other way."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], guard: Guard, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._guard = guard
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(WHERE)
        self._asked = asyncio.Event()
        self._closed = False
        self._loop.add_reader(self._socket.fileno(), self.look)
        self._task = self._loop.create_task(self._serve(), name="zap")
        self._task.add_done_callback(self._ended)

    def look(self) -> None:
        """There may be a question."""
        self._asked.set()

    def close(self) -> None:
        """Before the context ends. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._task.cancel()
            self._socket.close(0)

    async def _serve(self) -> None:
        """No deadline: it waits for strangers. The descriptor is edge-triggered, so read until there is nothing."""
        while True:
            self._asked.clear()
            while not self._closed:
                try:
                    question = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._socket.send_multipart(self._answer(question), zmq.NOBLOCK)
            await self._asked.wait()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, number, _, _, _, mechanism, *credentials = question
        if version != VERSION or mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != KEY_BYTES:
            self.refused["no key"] += 1
            return [VERSION, number, b"400", b"a key is needed", b"", b""]
        key = public_text(credentials[0])
        if self._guard.admit(key) is None:
            self.refused["unknown key"] += 1
            return [VERSION, number, b"400", b"unknown key", b"", b""]
        return [VERSION, number, b"200", b"", key.encode(), b""]  # the key: every frame of the connection will carry it

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._closed:
            if not task.cancelled():
                task.exception()  # fetched, so that nobody warns of it
            return
        cause = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.close()
        self._on_failure(cause or RuntimeError("it ended by itself"))
