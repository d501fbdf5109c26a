"""The global barriers of one run: start and end of its phases, round after round.

The machine is always gathering at exactly one barrier: (round, phase, edge). An arrival anywhere else is a duplicate (answered with the
stored opening), or refused. An agent that arrives with a version which some rollout worker does not serve yet is *held*: it has come,
but it is not counted until the version is ready. When the deadline of a barrier has passed, it may open without whoever is missing
(`leave_out`): agents are left out of what is left of the round, episodes are accounted for as dropped.

Invariants (checked by `violations`):
- R1 rounds and phases only go forward, a barrier opens once (I6);
- R2 no update starts while an episode of the round is not accounted for (I2);
- R3 a full barrier never stays shut (I6): whoever has come is counted as soon as its version is ready;
- R4 only agents that the update gate admitted, or that are not due, arrive at the end of an update;
- R5 an agent that was left out of a round is a member of no barrier of that round any more, and is not admitted to its update; at the
  next round it is a member again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from math import inf

from coordinator.core import barrier as barriers
from coordinator.core import order as orders
from coordinator.core.barrier import Barrier
from coordinator.core.deadlines import check_rules
from coordinator.core.order import UpdateOrder
from coordinator.core.updates import lags
from tinker.protocol.making import changed
from tinker.protocol.to_coordinator import AgentSpec, Arrivals, Arrive, RunSpec
from tinker.protocol.to_host import MayUpdate, Opened
from tinker.protocol.values import AgentName, Edge, Ended, EpisodeId, Phase, PolicyName

EPISODES = "episodes"  # the one member of the barrier at the end of a rollout or evaluation
KEPT = 12  # openings kept for arrivals that come again

Ready = Callable[[PolicyName, int], bool]
At = tuple[int, Phase, Edge]


def everything(_: PolicyName, __: int) -> bool:
    """Ready: all of these versions are, and need not be looked at one by one."""
    return True


class ArrivalRefused(Exception):
    """The message says what was found and what was expected. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Effect: these episodes are to be played; each inner tuple is a group, to be given to one host as a whole."""

    groups: tuple[tuple[EpisodeId, ...], ...]


Effect = Opened | MayUpdate | Begin


@dataclass(frozen=True, slots=True)
class Rounds:
    """See the module. `agents`: those of the run, by name; `players`: whose each policy is. `held`: agents whose version is not ready.
    `unaccounted`: episodes of this phase still running. `finished`: the last barrier of the last round has opened. `dropped`: agents that
    are left out of this round."""

    spec: RunSpec
    round: int
    phase: Phase
    edge: Edge
    barrier: Barrier
    versions: Mapping[AgentName, int] = field(default_factory=dict)
    samples: Mapping[AgentName, int] = field(default_factory=dict)
    held: Mapping[AgentName, Arrive] = field(default_factory=dict)
    unaccounted: frozenset[EpisodeId] = frozenset()
    ended: Mapping[Ended, int] = field(default_factory=dict)
    order: UpdateOrder = UpdateOrder(())
    openings: tuple[Opened, ...] = ()
    finished: bool = False
    agents: Mapping[AgentName, AgentSpec] = field(default_factory=dict)
    players: Mapping[PolicyName, AgentName] = field(default_factory=dict)
    dropped: frozenset[AgentName] = frozenset()

    @property
    def at(self) -> At:
        return self.round, self.phase, self.edge

    @property
    def of_agents(self) -> bool:
        """Whether agents arrive at the present barrier (else it waits for episodes)."""
        return self.edge == Edge.START or self.phase == Phase.UPDATE


def phases(spec: RunSpec, round: int) -> tuple[Phase, ...]:
    """The phases of a round. Round 0 only evaluates (the base line); it exists if the run evaluates at all. If agents may lag, updates
    are no phase: they have a track of their own (`coordinator.core.updates`)."""
    evaluates = spec.evaluate_every > 0 and spec.evaluations > 0
    if round == 0:
        return (Phase.EVALUATE,) if evaluates else ()
    last = evaluates and (round % spec.evaluate_every == 0 or round == spec.rounds)
    learning = () if lags(spec) else (Phase.UPDATE,)
    return (Phase.ROLLOUT, *learning, Phase.EVALUATE) if last else (Phase.ROLLOUT, *learning)


def begin(spec: RunSpec) -> Rounds:
    """A run before its first barrier. ValueError if the specification makes no sense."""
    _check(spec)
    first = spec.done + 1 if spec.done else 0 if phases(spec, 0) else 1
    agents = {agent.name: agent for agent in spec.agents}
    players = {agent.policy: agent.name for agent in spec.agents}
    return Rounds(
        spec, first, phases(spec, first)[0], Edge.START, barriers.gather(tuple(agents)), agents=agents, players=players
    )


def arrive(rounds: Rounds, message: Arrivals, ready: Ready, now: float) -> tuple[Rounds, tuple[Effect, ...]]:
    """Agents have come. ArrivalRefused, and nobody has, if one of them may not be here; a repeated or old arrival gets the stored
    opening, if there is one."""
    check_columns(rounds, message)
    at = (message.round, message.phase, message.edge)
    if at != rounds.at or rounds.finished:
        stored = [each for each in rounds.openings if (each.round, each.phase, each.edge) == at]
        if stored:
            return rounds, (stored[0], *_inside_again(rounds, message))
        raise ArrivalRefused(f"{_names(message)} arrives at {_words(at)}, the run gathers at {_words(rounds.at)}")
    if not rounds.of_agents:
        raise ArrivalRefused(f"nobody arrives at {_words(at)}: it opens when every episode is accounted for")
    awaited, held = rounds.barrier.awaited, rounds.held
    come = dict(zip(message.agents, message.versions, strict=True))
    if held or not awaited.issuperset(come):
        come = {name: number for name, number in come.items() if name in awaited and name not in held}
    if not come:
        return rounds, ()
    if rounds.edge == Edge.END and (early := set(rounds.order.due) - set(rounds.order.admitted)):
        for name in come:
            if name in early:
                raise ArrivalRefused(f"{name} has not been admitted to its update of round {rounds.round}")
    if (rounds.phase, rounds.edge) == (Phase.UPDATE, Edge.START):
        rows = dict(zip(message.agents, message.samples or repeat(0), strict=False))
        if len(come) < len(rows):
            rows = {name: rows[name] for name in come}
        rounds = changed(rounds, samples={**rounds.samples, **rows})
    return _settle(rounds, come, ready, now)


def account(rounds: Rounds, episode: EpisodeId, ended: Ended, now: float) -> tuple[Rounds, tuple[Effect, ...]]:
    """One episode is accounted for; a second time changes nothing."""
    if episode not in rounds.unaccounted:
        return rounds, ()
    counts = {**rounds.ended, ended: rounds.ended.get(ended, 0) + 1}
    after = changed(rounds, unaccounted=rounds.unaccounted - {episode}, ended=counts)
    return _pass(after, now)


def leave_out(rounds: Rounds, now: float) -> tuple[Rounds, tuple[Effect, ...]]:
    """The barrier opens without whoever is missing. Who is held, is missing: its version is not ready, and this round plays the one
    before."""
    if rounds.of_agents:
        out = rounds.barrier.missing
        left = barriers.leave_out(rounds.barrier)
        rounds = changed(rounds, held={}, dropped=rounds.dropped.union(map(AgentName, out)), barrier=left)
    else:
        out = tuple(map(str, sorted(rounds.unaccounted)))
        counts = {**rounds.ended, Ended.DROPPED: rounds.ended.get(Ended.DROPPED, 0) + len(out)}
        rounds = changed(rounds, unaccounted=frozenset(), ended=counts)
    return _pass(rounds, now, out)


def settle(rounds: Rounds, ready: Ready, now: float) -> tuple[Rounds, tuple[Effect, ...]]:
    """Count everybody who is held and whose version is ready by now."""
    return _settle(rounds, {}, ready, now)


def _settle(
    rounds: Rounds, come: Mapping[AgentName, int], ready: Ready, now: float
) -> tuple[Rounds, tuple[Effect, ...]]:
    """These come with these versions, after those that are held: who is ready is counted, the others are held."""
    waiting = {**{name: held.version for name, held in rounds.held.items()}, **come} if rounds.held else come
    agents = rounds.agents
    counted = dict(waiting)
    if ready is not everything:
        counted = {name: number for name, number in waiting.items() if ready(agents[name].policy, number)}
    held: dict[AgentName, Arrive] = {}
    for name in [name for name in waiting if name not in counted] if len(counted) < len(waiting) else ():
        held[name] = Arrive(rounds.spec.run, *rounds.at, name, waiting[name], rounds.samples.get(name, 0))
    order, admitted = rounds.order, tuple[AgentName, ...]()
    if (rounds.phase, rounds.edge) == (Phase.UPDATE, Edge.END):
        order, admitted = orders.finish(order, counted)
    barrier = barriers.arrive(rounds.barrier, tuple(counted), now)
    versions = {**rounds.versions, **counted}
    rounds = changed(rounds, held=held, versions=versions, barrier=barrier, order=order)
    rounds, opened = _pass(rounds, now)
    return rounds, (*(MayUpdate(rounds.spec.run, rounds.round, each) for each in admitted), *opened)


def missing(rounds: Rounds) -> tuple[str, ...]:
    """Who the current barrier waits for, in words."""
    if not rounds.of_agents:
        return (f"{len(rounds.unaccounted)} episodes",) if rounds.unaccounted else ()
    gated = set(rounds.order.due) - set(rounds.order.admitted)
    why = {
        **dict.fromkeys(gated, " (others update before it)"),
        **dict.fromkeys(rounds.held, " (its version is loading)"),
    }
    return tuple(f"{name}{why.get(AgentName(name), '')}" for name in rounds.barrier.missing)


def _pass(rounds: Rounds, now: float, dropped: tuple[str, ...] = ()) -> tuple[Rounds, tuple[Effect, ...]]:
    """Open the current barrier if it is full, and gather at the next one."""
    if not rounds.of_agents and not rounds.unaccounted:
        rounds = changed(rounds, barrier=barriers.arrive(rounds.barrier, (EPISODES,), now))
    if not rounds.barrier.opened or rounds.finished:
        return rounds, ()
    names, times = zip(*rounds.barrier.arrived, strict=True) if rounds.barrier.arrived else ((), ())
    opening = Opened(
        rounds.spec.run,
        *rounds.at,
        names,
        tuple([now - at for at in times]),
        tuple(rounds.players),
        tuple(map(rounds.versions.get, rounds.agents, repeat(0))),
        dropped,
    )
    rounds = changed(rounds, openings=(*rounds.openings[-KEPT + 1 :], opening))
    if rounds.edge == Edge.START:
        rounds, effects = _inside(rounds)
    else:
        rounds, effects = _onward(rounds), ()
    return rounds, (opening, *effects)


def _inside(rounds: Rounds) -> tuple[Rounds, tuple[Effect, ...]]:
    """The phase has begun: gather at its end."""
    spec = rounds.spec
    if rounds.phase == Phase.UPDATE:
        samples = rounds.samples
        if rounds.dropped:
            samples = {name: n for name, n in samples.items() if name not in rounds.dropped}
        order, admitted = orders.begin(spec.agents, spec.update_order, rounds.round, samples)
        after = changed(rounds, edge=Edge.END, barrier=_agents(rounds), order=order)
        return after, tuple(MayUpdate(spec.run, rounds.round, agent) for agent in admitted)
    groups = _groups(rounds)
    everything = frozenset(episode for group in groups for episode in group)
    after = changed(rounds, edge=Edge.END, barrier=barriers.gather((EPISODES,)), unaccounted=everything, ended={})
    return after, (Begin(groups),)


def _agents(rounds: Rounds) -> Barrier:
    """A barrier for the agents of this round."""
    dropped = rounds.dropped
    return barriers.gather(tuple([name for name in rounds.agents if name not in dropped] if dropped else rounds.agents))


def _groups(rounds: Rounds) -> tuple[tuple[EpisodeId, ...], ...]:
    """The episodes of this phase, as they are handed out."""
    spec = rounds.spec
    number, size = (spec.groups, spec.group_size) if rounds.phase == Phase.ROLLOUT else (spec.evaluations, 1)
    return tuple(
        tuple(EpisodeId(rounds.round, rounds.phase, group * size + k) for k in range(size)) for group in range(number)
    )


def _inside_again(rounds: Rounds, message: Arrivals) -> tuple[Effect, ...]:
    """What followed the opening that this arrival missed, as far as it still counts."""
    if message.edge != Edge.START or (message.round, message.phase, Edge.END) != rounds.at or rounds.finished:
        return ()
    if message.phase != Phase.UPDATE:
        return (Begin(_groups(rounds)),)
    updating = set(rounds.order.admitted) - rounds.order.done - rounds.held.keys()
    return tuple(MayUpdate(rounds.spec.run, rounds.round, name) for name in message.agents if name in updating)


def accounted(rounds: Rounds, episode: EpisodeId) -> tuple[Effect, ...]:
    """The opening at the end of the episode's phase, if that is over: whoever accounts for it again has missed it."""
    at = (episode.round, episode.phase, Edge.END)
    return tuple(each for each in rounds.openings if (each.round, each.phase, each.edge) == at)


def restart(rounds: Rounds, now: float) -> Rounds:
    """The coordinator restarted, perhaps on a clock that began anew: nobody has arrived in the future."""
    arrived = tuple((member, min(at, now)) for member, at in rounds.barrier.arrived)
    return changed(rounds, barrier=changed(rounds.barrier, arrived=arrived))


def _onward(rounds: Rounds) -> Rounds:
    """The phase is over: gather at the start of the next one."""
    here = phases(rounds.spec, rounds.round)
    rest = here[here.index(rounds.phase) + 1 :]
    number = rounds.round if rest else rounds.round + 1
    if number > rounds.spec.rounds:
        return changed(rounds, finished=True)
    dropped = rounds.dropped if rest else frozenset()
    phase = (rest or phases(rounds.spec, number))[0]
    after = changed(
        rounds, round=number, phase=phase, edge=Edge.START, dropped=dropped, samples={}, order=UpdateOrder(())
    )
    return changed(after, barrier=_agents(after))


def check_columns(rounds: Rounds, message: Arrivals) -> None:
    """ArrivalRefused if it is not one version (and one number of samples, or none) for each of some agents of this run."""
    names = set(message.agents)
    if strangers := names - rounds.agents.keys():
        raise ArrivalRefused(
            f"run {rounds.spec.run} has no agent {min(strangers)!r}; its agents are {', '.join(rounds.agents)}"
        )
    sizes = (len(message.agents), len(message.versions), len(message.samples))
    optional = {sizes[2], len(message.digests)} - {0}
    if not names or len(names) != sizes[0] or sizes[1] != sizes[0] or optional - {sizes[0]}:
        raise ArrivalRefused(
            f"arrivals of {len(names)} different agents in columns of {sizes[0]} agents, {sizes[1]} versions and {sizes[2]} samples, "
            f"{len(message.digests)} digests; expected agents, each once, with a version each, and samples and digests for all or none"
        )


def _names(message: Arrivals) -> str:
    more = len(message.agents) - 1
    return f"{message.agents[0]} (with {more} more)" if more else message.agents[0]


def _words(at: At) -> str:
    return f"the {at[2]} of {at[1]} in round {at[0]}"


def _check(spec: RunSpec) -> None:
    names = [agent.name for agent in spec.agents]
    policies = [agent.policy for agent in spec.agents]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a run needs at least one agent, each name once; it has {names}")
    if len(set(policies)) != len(policies):
        raise ValueError(f"each agent needs a policy of its own; the policies are {policies}")
    for what in ("rounds", "groups", "group_size", "capacity"):
        if getattr(spec, what) < 1:
            raise ValueError(f"{what} is {getattr(spec, what)}; it must be at least 1")
    if not 0 <= spec.done < spec.rounds:
        raise ValueError(f"{spec.done} of {spec.rounds} rounds have been played: there is none to go on with")
    for what in ("worker_deadline", "operation_deadline"):
        if not 0 <= getattr(spec, what) < inf:
            raise ValueError(f"{what} is {getattr(spec, what)}; it must be a finite number of seconds, 0 for none")
    ordered = [agent for group in spec.update_order for agent in group]
    if len(set(ordered)) != len(ordered) or not set(ordered) <= set(names):
        raise ValueError(f"update_order names {ordered}; it may name each of {names} once")
    for agent in spec.agents:
        if agent.max_lag < 0:
            raise ValueError(f"agent {agent.name} has max_lag {agent.max_lag}; it must be 0 (in step) or more")
    check_rules(spec)


def violations(rounds: Rounds, ready: Ready) -> list[str]:
    found = [f"{name} at the barrier" for name in barriers.violations(rounds.barrier)]
    found += orders.violations(rounds.order)
    if rounds.phase == Phase.UPDATE and rounds.unaccounted:
        found.append("R2")
    if not rounds.finished and rounds.barrier.opened:
        found.append("R3 open barrier not passed")
    if any(ready(rounds.agents[name].policy, held.version) for name, held in rounds.held.items()):
        found.append("R3 held although ready")
    if rounds.phase == Phase.UPDATE and rounds.edge == Edge.END:
        here = {name for name, _ in rounds.barrier.arrived}
        if here & set(rounds.order.due) - set(rounds.order.admitted):
            found.append("R4")
    if (
        rounds.of_agents
        and not rounds.finished
        and set(rounds.barrier.members) != rounds.agents.keys() - rounds.dropped
    ):
        found.append("R5 members")
    if not rounds.finished and rounds.dropped & (set(rounds.order.due) | rounds.held.keys()):
        found.append("R5 gate")
    return found
