"""Every random number of a run comes from the run's seed and a name: no order of events can change it."""

from __future__ import annotations

import hashlib


def derive(seed: int, *parts: object) -> int:
    """A 63-bit seed for the thing that `parts` names. Distinct names give distinct seeds (up to hash collisions)."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
