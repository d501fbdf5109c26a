"""What happens when an actor fails, as data: how often it is started again, how soon, and when it is given up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """At most `times` restarts within any `within` seconds. The n-th failure in that window waits `backoff` * 2**(n-1) seconds first, at
    most `longest`."""

    times: int = 3
    within: float = 60.0
    backoff: float = 0.1
    longest: float = 5.0


NEVER = Restart(times=0)


@dataclass(frozen=True, slots=True)
class Death:
    """An actor's end. `cause` is the exception behind it, if there was one."""

    actor: str
    reason: str
    cause: BaseException | None = None

    def __str__(self) -> str:
        return f"actor {self.actor!r} {self.reason}" + (
            f": {type(self.cause).__name__}: {self.cause}" if self.cause else ""
        )


class Intensity:
    """Counts one actor's failures against its policy."""

    __slots__ = ("_failures", "_policy")  # most actors never fail

    def __init__(self, policy: Restart) -> None:
        self._policy = policy
        self._failures: tuple[float, ...] = ()

    def failed(self, now: float) -> float | None:
        """Another failure: how long to wait before the restart; None: give up."""
        policy = self._policy
        self._failures = tuple(at for at in (*self._failures, now) if at > now - policy.within)
        recent = len(self._failures)
        if recent > policy.times:
            return None
        return float(min(policy.longest, policy.backoff * 2.0 ** min(recent - 1, 60)))
