"""The owner of one ZeroMQ socket: its options, its readiness, the pid guard, and an orderly end.

Why the sockets are driven like this (each was seen to go wrong otherwise): a ROUTER drops silently without MANDATORY and blocks for ever
on a blocking send, so every call is NOBLOCK and what does not fit waits in a queue of ours. The socket's descriptor is edge-triggered
and a send may swallow the edge, so one object owns the socket, reads until there is nothing, looks again after every send, and looks
every 250 ms in any case. Two peers of one identity starve each other, so identities are random. ZeroMQ cannot say what is left in its
own queue, so a connection hands frames over only while it is connected (its option IMMEDIATE would do that too, but throws away frames
that arrived and were not read yet when the connection breaks). A context per socket makes closing complete: when `aclose` returns, the
port and every descriptor are free.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable, Iterator

import anyio
import zmq

from tinker.runtime.transport.interface import Closed, Limits, TransportError
from tinker.runtime.transport.security import Guard
from tinker.runtime.transport.zap import ZapHandler

# ZeroMQ's flags as plain integers: its enumerations take longer than what they are for
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
SAFETY_POLL = 0.25  # seconds
HIGH_WATER = 1000  # frames ZeroMQ itself holds per peer and direction
HANDSHAKE_MS = 10_000  # a peer that has not shaken hands by then is cut off
RECONNECT_MS = (50, 2000)  # first and longest pause between attempts to connect


class OwnedSocket:
    """The owner of one ZeroMQ socket: options, readiness, the pid guard, and an orderly end. `look` is called when something may have
    changed: it must read `events` (that re-arms the descriptor), flush, and wake the receiver."""

    def __init__(self, kind: int, limits: Limits, look: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self.raw: zmq.Socket[bytes] = self._context.socket(kind)
        self._look = look
        self._pid = os.getpid()
        self._looking = False
        self._progress = asyncio.Event()
        self._monitor: zmq.Socket[bytes] | None = None
        self.zap: ZapHandler | None = None
        self.closed = False
        beat = max(1, int(limits.heartbeat * 1000))
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, limits.frame),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, beat),
            (zmq.HEARTBEAT_TIMEOUT, 3 * beat),
            (zmq.HEARTBEAT_TTL, 3 * beat),
            (zmq.RECONNECT_IVL, RECONNECT_MS[0]),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1]),
        ):
            self.raw.set(option, value)

    def guarded(self, guard: Guard, on_failure: Callable[[BaseException], None]) -> None:
        """From now on the guard decides about every handshake."""
        self.zap = ZapHandler(self._context, guard, on_failure)

    def start(self) -> None:
        """Watch the descriptor from now on."""
        self._loop.add_reader(self.raw.fileno(), self._ready)
        self._timer = self._loop.call_later(SAFETY_POLL, self._poll)

    def watch(self, events: int, heard: Callable[[], None]) -> None:
        """Call `heard` when `monitored` has something to say."""
        self._monitor = self.raw.get_monitor_socket(events)
        list(self.monitored())  # a socket that was never read from does not signal
        self._loop.add_reader(self._monitor.fileno(), heard)
        self._heard = heard

    def monitored(self) -> Iterator[tuple[int, int]]:
        """What the monitor has seen since the last call: (event, descriptor)."""
        assert self._monitor is not None
        while True:
            try:
                event = self._monitor.recv(zmq.NOBLOCK)
                self._monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield struct.unpack("=HI", event)

    def look_again(self) -> None:
        """After a send, which may have swallowed the edge."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look_once)

    def guard(self) -> None:
        if self.closed:
            raise Closed("this end is closed")
        if os.getpid() != self._pid:
            raise TransportError(
                f"this socket belongs to process {self._pid}: open your own after a fork, or start processes by spawn"
            )

    @property
    def readable(self) -> bool:
        return bool(int(self.raw.get(EVENTS)) & POLLIN)

    def abandon(self) -> None:
        """It was never started."""
        self._unwatch()
        if self.zap is not None:
            self.zap.close()
        self.closed = True
        self._context.destroy(linger=0)

    def close_now(self) -> None:
        """Close without a word: nobody is let in or heard from here on. `aclose` still has to be called."""
        if not self.closed:
            self._release(0)

    async def aclose(self, flush: Callable[[], bool], grace: float) -> None:
        """Flush while there is grace, then release everything. Waits at most `grace` (the rest of it is ZeroMQ's linger)."""
        deadline = self._loop.time() + grace
        try:
            with anyio.move_on_after(0 if self.closed else grace):
                while not self.closed and not flush():
                    self._progress.clear()
                    await self._progress.wait()
        finally:
            if not self.closed:
                self._release(int(max(0.0, deadline - self._loop.time()) * 1000))
            with anyio.CancelScope(shield=True):  # bounded by the linger
                await anyio.to_thread.run_sync(self._context.term)

    def _release(self, linger_ms: int) -> None:
        self.closed = True
        self._timer.cancel()
        self._loop.remove_reader(self.raw.fileno())
        self._unwatch()
        if self.zap is not None:
            self.zap.close()
        self.raw.close(linger_ms)

    def _unwatch(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self.raw.disable_monitor()
            self._monitor.close(0)

    def _ready(self) -> None:
        self._look()
        self._progress.set()

    def _look_once(self) -> None:
        self._looking = False
        if not self.closed:
            self._ready()

    def _poll(self) -> None:
        self._timer = self._loop.call_later(SAFETY_POLL, self._poll)
        self._heard()
        if self.zap is not None:
            self.zap.look()
        if not self.closed:
            self._ready()
