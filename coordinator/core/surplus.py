"""What a task server still holds although nobody wants it: it was told so, and that was lost. Every heartbeat says what it holds."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.core.run import Run, Sends
from tinker.protocol.to_coordinator import Heartbeat
from tinker.protocol.to_taskserver import Release, Unload
from tinker.protocol.values import BASE, PeerName, RunId


def surplus(runs: Mapping[RunId, Run], peer: PeerName, heartbeat: Heartbeat) -> Sends:
    """Ask again for runs to be released and versions to be unloaded. Doing that twice changes nothing."""
    named = {*heartbeat.runs, *(held.run for held in heartbeat.holding)}
    sends: Sends = [(peer, Release(run_id)) for run_id in sorted(named - set(runs))]
    for held in heartbeat.holding:
        run = runs.get(held.run)
        if run is None or held.version == BASE or run.owners.get(held.worker) != peer:
            continue
        if held.version not in run.versions.served:
            sends.append((peer, Unload(held.run, held.worker, held.version)))
    return sends
