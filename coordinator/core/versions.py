"""Which versions of each policy exist, and which rollout workers serve them.

Invariants (checked by `violations`):
- V1 versions of a policy only rise, and a published version never changes its digest (I9);
- V2 a version is served only by workers that acknowledged exactly its digest;
- V3 a version is ready only when every rollout worker in service has acknowledged it;
- V4 `loading` are the policies whose current version is not ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinker.protocol.values import BASE, BlobRef, PolicyName, PolicyVersion, WorkerName

KEPT = 2  # versions of a policy that stay loaded: the current one and the one before (numbers may have gaps)


class WrongWeights(Exception):
    """A worker acknowledged other weights than those published; the message names both digests. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Versions:
    """`workers`: rollout workers in service. `served`: which of them acknowledged a version. `away`: workers that have not said since
    the coordinator restarted what they hold; they serve nothing and are waited for. `loading`: policies whose current version is not
    ready (so that a barrier of many agents need not compare sets for each)."""

    workers: frozenset[WorkerName] = frozenset()
    current: Mapping[PolicyName, int] = field(default_factory=dict)
    adapters: Mapping[PolicyVersion, BlobRef] = field(default_factory=dict)
    served: Mapping[PolicyVersion, frozenset[WorkerName]] = field(default_factory=dict)
    away: frozenset[WorkerName] = frozenset()
    loading: frozenset[PolicyName] = frozenset()

    def serving(self, version: PolicyVersion) -> frozenset[WorkerName]:
        return self.workers - self.away if version == BASE else self.served.get(version, frozenset())

    def ready(self, version: PolicyVersion) -> bool:
        return bool(self.workers) and self.serving(version) >= self.workers

    def loaded(self, policy: PolicyName, number: int) -> bool:
        """The same as `ready`, and quick for a current version."""
        if self.current.get(policy) == number:
            return policy not in self.loading
        return self.ready(PolicyVersion(policy, number))

    def not_serving(self, version: PolicyVersion) -> tuple[WorkerName, ...]:
        return tuple(sorted(self.workers - self.serving(version)))


def publish(versions: Versions, version: PolicyVersion, adapter: BlobRef) -> Versions:
    """A new version exists. ValueError if it does not rise, or re-uses a number with other weights."""
    known = versions.adapters.get(version)
    if known is not None and known.digest == adapter.digest:
        return versions
    newest = versions.current.get(version.policy, -1)
    if version.version <= newest:
        raise ValueError(f"{version} was published after version {newest}; versions must rise and are never used again")
    return replace(
        versions,
        current={**versions.current, version.policy: version.version},
        adapters={**versions.adapters, version: adapter},
        served={**versions.served, version: frozenset()},
        loading=versions.loading | {version.policy},
    )


def acknowledge(versions: Versions, version: PolicyVersion, worker: WorkerName, digest: str) -> Versions:
    """The worker serves the version from now on. ValueError if nobody published it, WrongWeights if its digest is another."""
    adapter = versions.adapters.get(version)
    if adapter is None:
        raise ValueError(f"worker {worker} acknowledged {version}, which was never published")
    if adapter.digest != digest:
        raise WrongWeights(f"it loaded {version} with digest {digest[:12]}, published is {adapter.digest[:12]}")
    if worker not in versions.workers - versions.away:
        return versions
    after = replace(versions, served={**versions.served, version: versions.serving(version) | {worker}})
    if version.version == versions.current[version.policy] and after.ready(version):
        return replace(after, loading=versions.loading - {version.policy})
    return after


def recent(versions: Versions) -> dict[PolicyName, int]:
    """The oldest of the `KEPT` newest versions of each policy."""
    numbers: dict[PolicyName, list[int]] = {}
    for version in versions.served:
        numbers.setdefault(version.policy, []).append(version.version)
    return {policy: sorted(each)[-KEPT:][0] for policy, each in numbers.items()}


def retire(versions: Versions, oldest: Mapping[PolicyName, int]) -> tuple[Versions, tuple[PolicyVersion, ...]]:
    """Forget versions older than these, for which nobody may ask any more; returns those to unload."""
    old = tuple(sorted([v for v in versions.served if v.version < oldest.get(v.policy, 0)]))
    if not old:
        return versions, ()
    gone = set(old)
    return replace(versions, served={v: by for v, by in versions.served.items() if v not in gone}), old


def join(versions: Versions, worker: WorkerName) -> tuple[Versions, tuple[PolicyVersion, ...]]:
    """A rollout worker enters service, or is back; returns what it must load."""
    after = _loading(replace(versions, workers=versions.workers | {worker}, away=versions.away - {worker}))
    return after, tuple(sorted(v for v in versions.served if versions.adapters.get(v) is not None))


def restart(versions: Versions) -> Versions:
    """The coordinator restarted: versions are what they were, and nobody serves them until it says so."""
    return _loading(replace(versions, served={v: frozenset() for v in versions.served}, away=versions.workers))


def leave(versions: Versions, worker: WorkerName) -> Versions:
    """A rollout worker is out of service: it serves nothing and is waited for no longer."""
    gone = {worker}
    left = replace(
        versions,
        workers=versions.workers - gone,
        served={v: by - gone for v, by in versions.served.items()},
        away=versions.away - gone,
    )
    return _loading(left)


def _loading(versions: Versions) -> Versions:
    current = (PolicyVersion(policy, number) for policy, number in versions.current.items())
    return replace(versions, loading=frozenset(v.policy for v in current if not versions.ready(v)))


def violations(versions: Versions) -> list[str]:
    found = []
    if any(version.version > versions.current.get(version.policy, -1) for version in versions.adapters):
        found.append("V1")
    if any(not by <= versions.workers - versions.away for by in versions.served.values()):
        found.append("V2")
    if any(versions.ready(version) and versions.not_serving(version) for version in versions.served):
        found.append("V3")
    if versions.loading != _loading(versions).loading:
        found.append("V4")
    return found
