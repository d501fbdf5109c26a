"""The update gate: which agent may update now, and in what order.

Groups of agents update one after the other; agents of one group together. An agent is due in rounds divisible by its `every` (0: frozen)
and only if its batch has samples; an agent that is not due is never admitted and never waited for.

Invariants (checked by `violations`):
- O1 only due agents are admitted, each once;
- O2 no agent of a later group is admitted before every due agent of the earlier groups is done;
- O3 while some due agent is not done, at least one admitted agent is not done (the gate never stays shut).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tinker.protocol.to_coordinator import AgentSpec
from tinker.protocol.values import AgentName


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """`groups` hold only due agents; groups before `at` are done."""

    groups: tuple[tuple[AgentName, ...], ...]
    at: int = 0
    done: frozenset[AgentName] = frozenset()

    @property
    def admitted(self) -> tuple[AgentName, ...]:
        """Agents that have been let through so far, done or not."""
        return tuple(agent for group in self.groups[: self.at + 1] for agent in group)

    @property
    def due(self) -> tuple[AgentName, ...]:
        return tuple(agent for group in self.groups for agent in group)


def due(agent: AgentSpec, round: int, samples: int) -> bool:
    """Whether this agent updates in this round."""
    return agent.every > 0 and round % agent.every == 0 and samples > 0


def begin(
    agents: tuple[AgentSpec, ...],
    groups: tuple[tuple[AgentName, ...], ...],
    round: int,
    samples: Mapping[AgentName, int],
) -> tuple[UpdateOrder, tuple[AgentName, ...]]:
    """The gate of one round, and who is admitted at once. Agents that no group names form a last group of their own."""
    with_rows = {name for name, rows in samples.items() if rows > 0}
    is_due = {agent.name for agent in agents if agent.name in with_rows and due(agent, round, samples[agent.name])}
    named = {agent for group in groups for agent in group}
    rest = tuple([agent.name for agent in agents if agent.name in is_due and agent.name not in named])
    filtered = (tuple(agent for agent in group if agent in is_due) for group in (*groups, rest))
    order = UpdateOrder(tuple(group for group in filtered if group))
    return order, order.groups[0] if order.groups else ()


def finish(order: UpdateOrder, agents: Collection[AgentName]) -> tuple[UpdateOrder, tuple[AgentName, ...]]:
    """The updates of these agents have ended; returns who is admitted now because of it."""
    ended = set(order.admitted).intersection(agents) - order.done
    if not ended:
        return order, ()
    after = replace(order, done=order.done | ended)
    if after.at + 1 < len(after.groups) and after.done >= set(after.groups[after.at]):
        after = replace(after, at=after.at + 1)
        return after, after.groups[after.at]
    return after, ()


def violations(order: UpdateOrder) -> list[str]:
    found = []
    if len(set(order.admitted)) != len(order.admitted) or not order.done <= set(order.admitted):
        found.append("O1")
    earlier = {agent for group in order.groups[: order.at] for agent in group}
    if not earlier <= order.done:
        found.append("O2")
    if set(order.due) - order.done and not set(order.admitted) - order.done:
        found.append("O3")
    return found
