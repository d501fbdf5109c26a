"""How long a global barrier may stay shut, and what is said of whoever is missing then.

A gathering has one deadline on the coordinator's clock, counted from the opening of the barrier before (or the restart of the coordinator).
It takes effect at the first tick after it: what has arrived before that tick has arrived, so everybody hears one decision and no more.
"""

from __future__ import annotations

from math import inf

from coordinator.core.updates import lags
from tinker.protocol.to_coordinator import BarrierRule, RunSpec, Straggler
from tinker.protocol.values import Edge, Phase

NO_UPDATE_BARRIER = "with max_lag nobody waits where updates begin and end, so there is nothing to be late for; give it to rollout_start"
NAMED = 20  # episodes that a reason names one by one


def rule_of(spec: RunSpec, phase: Phase, edge: Edge) -> BarrierRule | None:
    """The rule of this barrier; None: it has no deadline."""
    return next((rule for rule in spec.barriers if (rule.phase, rule.edge) == (phase, edge) and rule.deadline), None)


def members(spec: RunSpec, phase: Phase, edge: Edge) -> int:
    """How many may come to this barrier: agents, or episodes."""
    if edge == Edge.START or phase == Phase.UPDATE:
        return len(spec.agents)
    return spec.groups * spec.group_size if phase == Phase.ROLLOUT else spec.evaluations


def check_rules(spec: RunSpec) -> None:
    """ValueError if two rules are of one barrier, or one makes no sense."""
    places = [(rule.phase, rule.edge) for rule in spec.barriers]
    for rule in spec.barriers:
        where = f"the rule of the {rule.edge} of {rule.phase}"
        if lags(spec) and rule.phase == Phase.UPDATE and rule.deadline:
            raise ValueError(f"{where} has a deadline; {NO_UPDATE_BARRIER}")
        if places.count((rule.phase, rule.edge)) > 1:
            raise ValueError(f"{where} is given twice; each barrier has one")
        if not 0 <= rule.deadline < inf:
            raise ValueError(
                f"{where} has the deadline {rule.deadline}; it must be a finite number of seconds, 0 for none"
            )
        most = members(spec, rule.phase, rule.edge)
        if rule.quorum < 1 or (rule.straggler == Straggler.DROP and rule.deadline and most and rule.quorum > most):
            raise ValueError(f"{where} has the quorum {rule.quorum}; it must be at least 1, and {most} can come")


def shut(rule: BarrierRule, round: int, missing: tuple[str, ...], waited: float, come: int) -> str:
    """Why the run stops: the barrier, the round, everybody missing, and how long."""
    named = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
    few = f" (come are {come}, the quorum is {rule.quorum})" if rule.straggler == Straggler.DROP else ""
    return (
        f"the {rule.edge} of {rule.phase} in round {round} did not open in {waited:.1f} s, its deadline is {rule.deadline:g} s: "
        f"missing are {named}{few}. Look at why they are late, or give barriers.{rule.phase}_{rule.edge} a longer deadline "
        f"or another straggler policy"
    )
