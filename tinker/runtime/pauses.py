"""Pauses between attempts, never twice the same: who asks again stays in step with nobody, and with nothing that loses its messages.

Peers that were cut off together come back one after the other, and a network that loses every second message does not lose the same one for
ever. No randomness: the same name gives the same pauses.
"""

from __future__ import annotations

import zlib

GOLDEN = 0.6180339887498949  # its multiples lie evenly between 0 and 1, however many there are


class Pauses:
    """`name` decides where the sequence begins."""

    def __init__(self, name: str) -> None:
        self._at = zlib.crc32(name.encode()) / 2**32

    def about(self, seconds: float) -> float:
        """Between three and five quarters of so many seconds."""
        self._at = (self._at + GOLDEN) % 1.0
        return seconds * (0.75 + 0.5 * self._at)
