"""How the bundles are named in which further hosts leave the episodes that they have played."""

from __future__ import annotations

from tinker.protocol.values import Phase, RunId


def played_bundles(run: RunId, round: int, phase: Phase) -> str:
    """What the names of those of one phase begin with: the run's name, as all its bundles do, and no agent's (there is no @ in one)."""
    return f"{run}=@{round}-{phase}-"
