"""With which version an agent may come to a barrier, and which versions must stay loaded for that (I1).

In step (no agent may lag) it is the newest version, always. Else a round is played with the version an agent had when it came to the start
of the rollout: any one from the end of its update `max_lag` rounds ago on. It holds for the whole round, whatever is published meanwhile.
An agent comes only when that update has ended: the run waits rather than sample tokens that nobody could train on.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.core import updates as upd
from coordinator.core import versions as ver
from coordinator.core.rounds import ArrivalRefused, Rounds
from coordinator.core.updates import Updates
from coordinator.core.versions import Versions
from tinker.protocol.to_coordinator import Arrivals
from tinker.protocol.values import AgentName, Edge, OpId, Phase, PolicyName, PolicyVersion


def check(
    message: Arrivals, rounds: Rounds, updates: Updates, versions: Versions, moving: Mapping[AgentName, OpId]
) -> None:
    """ArrivalRefused if an agent comes with a version that is not its policy's, too early, or while an operation (`moving`) still moves
    its weights. Nobody else is looked at: agents of other runs, and those that come again, whose version may be an old one by now."""
    if not (updates.overlap or message.digests or moving) and all_newest(message, rounds, versions):
        return
    digests = message.digests or [""] * len(message.agents)
    for name, number, digest in zip(message.agents, message.versions, digests, strict=False):
        if name not in rounds.agents or (updates.overlap and _again(message, rounds, updates, name)):
            continue
        policy = rounds.agents[name].policy
        newest = versions.current.get(policy, 0)  # before its Attach is done an agent may wait for version 0
        beside = updates.overlap and message.phase == Phase.ROLLOUT
        if updates.overlap and message.phase != Phase.UPDATE:
            _check_pace(message, updates, name)
        least = upd.oldest(updates, name, message.round) if beside else newest
        there = number == newest or PolicyVersion(policy, number) in versions.served
        if not least <= number <= newest or not there:
            bound = f", the oldest for this round is {least}" if beside else ""
            raise ArrivalRefused(f"{name} arrives with version {number} of {policy!r}, current is {newest}{bound}")
        published = versions.adapters.get(PolicyVersion(policy, number))
        if digest and (published is None or published.digest != digest):
            ours = published.digest[:12] if published else "nothing yet"
            raise ArrivalRefused(f"{name} arrives with digest {digest[:12]} of {policy}@{number}, published is {ours}")
        if name in moving and not beside:
            raise ArrivalRefused(f"{name} arrives while its operation {moving[name]} is still running")


def all_newest(message: Arrivals, rounds: Rounds, versions: Versions) -> bool:
    """Whether it is quick to see that these are all agents of the run, with the newest versions, as they nearly always are."""
    everybody = len(message.agents) == len(rounds.agents) and message.agents == tuple(rounds.agents)
    return everybody and message.versions == tuple(map(versions.current.get, rounds.players))


def _again(message: Arrivals, rounds: Rounds, updates: Updates, agent: AgentName) -> bool:
    """Whether this agent has come before."""
    if message.phase == Phase.UPDATE:
        return upd.back(updates, message.round, agent)
    return agent not in rounds.barrier.awaited or agent in rounds.held


def _check_pace(message: Arrivals, updates: Updates, agent: AgentName) -> None:
    rollout = message.phase == Phase.ROLLOUT
    late = upd.behind(updates, agent, message.round) if rollout else upd.unfinished(updates, agent)
    if late:
        lag = updates.agents[agent].max_lag
        bound = f"its max_lag is {lag}" if rollout else "an evaluation waits for every update"
        raise ArrivalRefused(
            f"{agent} arrives at {message.phase} of round {message.round} before its update of round {late} has ended; {bound}"
        )


def oldest(rounds: Rounds, updates: Updates, versions: Versions) -> Mapping[PolicyName, int]:
    """The oldest version of each policy that somebody may still ask for. If agents may lag: with what the present round plays, or with
    what its agent may come to the next; that are at most max_lag + 2 updates."""
    if not updates.overlap:
        return ver.recent(versions)
    gathers = (rounds.phase, rounds.edge) == (Phase.ROLLOUT, Edge.START)
    coming = rounds.round if gathers else rounds.round + 1
    found = {}
    for name, agent in rounds.agents.items():
        held = rounds.held[name].version if name in rounds.held else None
        numbers = (upd.oldest(updates, name, coming), rounds.versions.get(name, 0), held)
        found[agent.policy] = min(number for number in numbers if number is not None)
    return found


def violations(rounds: Rounds, updates: Updates, versions: Versions) -> list[str]:
    """I1: a rollout that is played keeps the bound; nothing is kept beyond it, and nothing that is needed is gone."""
    if not updates.overlap:
        return []
    found = []
    playing = (rounds.phase, rounds.edge) == (Phase.ROLLOUT, Edge.END) and not rounds.finished
    for name, agent in rounds.agents.items():
        number = rounds.versions.get(name, 0)
        if playing and name not in rounds.dropped:
            if upd.behind(updates, name, rounds.round):
                found.append("I1 played before an update that must have ended")
            if number < upd.oldest(updates, name, rounds.round):
                found.append("I1 a version older than the bound")
        here = PolicyVersion(agent.policy, number)
        if playing and here in versions.adapters and here not in versions.served:
            found.append("I9 what is played is unloaded")
        kept = [each for each in versions.served if each.policy == agent.policy and each.version > number]
        if playing and name not in rounds.dropped and len(kept) > agent.max_lag + 1:
            found.append("V5 more versions than anybody may ask for")
    return found
