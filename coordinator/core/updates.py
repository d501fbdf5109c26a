"""The update track of a run whose agents may lag: each updates at its own pace while the next rounds are played.

When the rollout of a round has ended, the gate of that round opens. An agent with a batch comes to it and is admitted as soon as its own
updates of earlier rounds have ended and everybody who updates before it in this round is done (`update_order`; nothing else orders agents).
Its update has ended when it has come back and its version is loaded everywhere; an agent that is not due just comes back. Nobody waits
here for an agent that does not update before it: who must wait for whom is decided at the start of rollouts (`behind`).

Invariants (checked by `violations`):
- G1 an agent is in one update at a time, and in the order of the rounds;
- G2 nobody is admitted before everybody of the groups before it in its round is done;
- G3 whoever waits and may update is admitted (a gate never stays shut);
- G4 who is back is done as soon as its version is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from coordinator.core import order as orders
from tinker.protocol.to_coordinator import AgentSpec, RunSpec
from tinker.protocol.to_host import MayUpdate, UpdateEnded
from tinker.protocol.values import AgentName, PolicyName, RunId

Ready = Callable[[PolicyName, int], bool]
Effect = MayUpdate | UpdateEnded


class GateRefused(Exception):
    """The message says what was found and what was expected. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The updates of one round. `waiting`: agents that have a batch and are not admitted yet. `held`: back, with this version, which is
    loading. `done`: their update of this round has ended."""

    round: int
    members: tuple[AgentName, ...]
    waiting: tuple[AgentName, ...] = ()
    admitted: frozenset[AgentName] = frozenset()
    held: Mapping[AgentName, int] = field(default_factory=dict)
    done: frozenset[AgentName] = frozenset()

    def lacks(self, agent: AgentName) -> bool:
        """Whether this agent has still to come back."""
        return agent in self.members and agent not in self.done

    @property
    def updating(self) -> frozenset[AgentName]:
        """Whose weights may move."""
        return self.admitted - self.done - self.held.keys()


@dataclass(frozen=True, slots=True)
class Updates:
    """`gates`: of rounds in which somebody is not done, oldest first. `last`: the newest round whose gate was opened. `marks`: (round,
    version) of the ends of each agent's updates, as far back as the start of a rollout may still ask. `overlap`: whether the run has this
    track, because some agent may lag; else updates are a phase between barriers (`coordinator.core.rounds`)."""

    run: RunId
    agents: Mapping[AgentName, AgentSpec] = field(default_factory=dict)
    groups: tuple[tuple[AgentName, ...], ...] = ()
    gates: tuple[Gate, ...] = ()
    last: int = 0
    marks: Mapping[AgentName, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    overlap: bool = False

    @property
    def updating(self) -> frozenset[AgentName]:
        """Whose weights may move now."""
        return frozenset(agent for gate in self.gates for agent in gate.updating)


def lags(spec: RunSpec) -> bool:
    """Whether rollouts and updates of this run overlap."""
    return any(map(attrgetter("max_lag"), spec.agents))


def begin(spec: RunSpec) -> Updates:
    named = {agent for group in spec.update_order for agent in group}
    rest = tuple(agent.name for agent in spec.agents if agent.name not in named)
    agents = {agent.name: agent for agent in spec.agents}
    return Updates(spec.run, agents, (*spec.update_order, rest), overlap=lags(spec))


def open_gate(updates: Updates, round: int, members: Sequence[AgentName]) -> Updates:
    """The rollout of this round has ended: its members may update."""
    gate = Gate(round, tuple(members))
    return _forgot(replace(updates, gates=(*updates.gates, gate) if members else updates.gates, last=round))


def behind(updates: Updates, agent: AgentName, round: int) -> int:
    """The oldest round whose update of this agent must end before this rollout may begin with it (0: none)."""
    newest = round - 1 - updates.agents[agent].max_lag
    return next((gate.round for gate in updates.gates if gate.round <= newest and gate.lacks(agent)), 0)


def back(updates: Updates, round: int, agent: AgentName) -> bool:
    """Whether this agent has come back from its update of this round."""
    gate = next((gate for gate in updates.gates if gate.round == round), None)
    return gate is None or agent in gate.held or not gate.lacks(agent)


def unfinished(updates: Updates, agent: AgentName) -> int:
    """The oldest round whose update of this agent has not ended (0: none)."""
    return next((gate.round for gate in updates.gates if gate.lacks(agent)), 0)


def oldest(updates: Updates, agent: AgentName, round: int) -> int:
    """The oldest version with which this agent may come to the rollout of this round."""
    newest = round - 1 - updates.agents[agent].max_lag
    return next((version for at, version in reversed(updates.marks.get(agent, ())) if at <= newest), 0)


def start(updates: Updates, round: int, samples: Mapping[AgentName, int]) -> tuple[Updates, tuple[Effect, ...]]:
    """These agents have a batch and want to update. GateRefused, and nobody has come, if one of them may not. Whoever comes again is
    told again."""
    gate = _gate(updates, round, samples)
    if gate is None:
        return updates, ()
    fresh = [agent for agent in samples if agent not in gate.admitted and agent not in gate.waiting]
    for agent in fresh:
        if not orders.due(updates.agents[agent], round, samples[agent]):
            raise GateRefused(
                f"{agent} comes to its update of round {round} with {samples[agent]} rows, and updates every "
                f"{updates.agents[agent].every} rounds: it is not due, and only arrives at the end"
            )
    fresh = [agent for agent in fresh if agent not in gate.done]
    told = tuple(MayUpdate(updates.run, round, agent) for agent in samples if agent in gate.updating)
    after, effects = _admit(_with(updates, replace(gate, waiting=(*gate.waiting, *fresh))))
    return after, (*told, *effects)


def end(
    updates: Updates, round: int, versions: Mapping[AgentName, int], ready: Ready
) -> tuple[Updates, tuple[Effect, ...]]:
    """These agents are back, with these versions. GateRefused, and nobody is, if one of them may not be. Whoever comes again is told
    again."""
    gate = _gate(updates, round, versions)
    if gate is None:
        return updates, tuple(UpdateEnded(updates.run, round, agent) for agent in versions)
    for agent in versions:
        earlier = unfinished(updates, agent)
        if agent in gate.waiting:
            raise GateRefused(f"{agent} has not been admitted to its update of round {round}")
        if gate.lacks(agent) and earlier != round:
            raise GateRefused(
                f"{agent} ends its update of round {round} before that of round {earlier}; updates end in order"
            )
    told = tuple(UpdateEnded(updates.run, round, agent) for agent in versions if not gate.lacks(agent))
    back = {agent: number for agent, number in versions.items() if gate.lacks(agent) and agent not in gate.held}
    after, effects = settle(_with(updates, replace(gate, held={**gate.held, **back})), ready)
    return after, (*told, *effects)


def settle(updates: Updates, ready: Ready) -> tuple[Updates, tuple[Effect, ...]]:
    """Whoever is back and whose version is loaded by now is done; who waited for that is admitted."""
    ended: list[Effect] = []
    for gate in updates.gates:
        loaded = {agent: number for agent, number in gate.held.items() if ready(updates.agents[agent].policy, number)}
        if not loaded:
            continue
        held = {agent: number for agent, number in gate.held.items() if agent not in loaded}
        marks = {agent: (*updates.marks.get(agent, ()), (gate.round, number)) for agent, number in loaded.items()}
        after = replace(gate, held=held, done=gate.done.union(loaded))
        updates = _with(replace(updates, marks={**updates.marks, **marks}), after)
        ended += [UpdateEnded(updates.run, gate.round, agent) for agent in loaded]
    if not ended:
        return updates, ()
    after_all, admitted = _admit(_forgot(updates))
    return after_all, (*ended, *admitted)


def _gate(updates: Updates, round: int, agents: Iterable[AgentName]) -> Gate | None:
    """The gate of this round; None: everybody is done there. GateRefused if it is not open yet, or one is not of it."""
    if not 0 < round <= updates.last:
        raise GateRefused(
            f"nobody updates in round {round}: its rollout has not ended; the newest that has is {updates.last}"
        )
    gate = next((gate for gate in updates.gates if gate.round == round), None)
    for agent in agents:
        if gate is not None and agent not in gate.members:
            raise GateRefused(f"{agent} was left out of round {round}: it does not update in it")
    return gate


def _with(updates: Updates, gate: Gate) -> Updates:
    gates = (gate if each.round == gate.round else each for each in updates.gates)
    return replace(updates, gates=tuple(each for each in gates if len(each.done) < len(each.members)))


def _may(updates: Updates, gate: Gate, agent: AgentName) -> bool:
    """Whether this agent, which waits at this gate, may update."""
    if unfinished(updates, agent) != gate.round:
        return False
    place = next(k for k, group in enumerate(updates.groups) if agent in group)
    return not any(gate.lacks(other) for group in updates.groups[:place] for other in group)


def _admit(updates: Updates) -> tuple[Updates, tuple[Effect, ...]]:
    effects: list[Effect] = []
    for gate in updates.gates:
        let = tuple(agent for agent in gate.waiting if _may(updates, gate, agent))
        if let:
            waiting = tuple(agent for agent in gate.waiting if agent not in let)
            updates = _with(updates, replace(gate, waiting=waiting, admitted=gate.admitted.union(let)))
            effects += [MayUpdate(updates.run, gate.round, agent) for agent in let]
    return updates, tuple(effects)


def _forgot(updates: Updates) -> Updates:
    """Without the marks that no rollout to come may ask for."""
    kept = {}
    for agent, marks in updates.marks.items():
        newest = updates.last - updates.agents[agent].max_lag
        first = max((k for k, (round, _) in enumerate(marks) if round <= newest), default=0)
        kept[agent] = marks[first:]
    return replace(updates, marks=kept)


def violations(updates: Updates, ready: Ready) -> list[str]:
    found = []
    moving = [agent for gate in updates.gates for agent in gate.updating]
    if len(set(moving)) != len(moving):
        found.append("G1 twice at once")
    for gate in updates.gates:
        busy = gate.updating | gate.held.keys()
        if any(unfinished(updates, agent) != gate.round for agent in busy):
            found.append("G1 out of order")
        if not gate.done | busy | set(gate.waiting) <= set(gate.members):
            found.append("G1 strangers")
        if any(not _may(updates, gate, agent) for agent in gate.updating):
            found.append("G2")
        if any(_may(updates, gate, agent) for agent in gate.waiting):
            found.append("G3")
        if any(ready(updates.agents[agent].policy, number) for agent, number in gate.held.items()):
            found.append("G4")
    return found
