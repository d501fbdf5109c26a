"""Who plays what: agents, their seats, their policies, from a scenario and a configuration. Everything wrong is said at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from coordinator.app.config import BARRIERS, ConfigError, Learning, RunConfig
from coordinator.core.deadlines import NO_UPDATE_BARRIER
from scenarios import Scenario, ScenarioError
from scenarios.host import Cast, held_out
from scenarios.scenario import NAME, NAME_RULE
from tinker.algorithms.losses import UnknownLoss, find_loss
from tinker.algorithms.registry import make_algorithm
from tinker.protocol.seeds import derive
from tinker.protocol.to_coordinator import AgentSpec, BarrierRule, RunSpec, Straggler
from tinker.protocol.values import AgentName, Edge, LoraSpec, ModelCard, Phase, PolicyName, RunId, SeatName


@dataclass(frozen=True, slots=True)
class Role:
    """One agent of a run: its seats, its policy (named after run and agent, so that runs never share one), and how it learns."""

    name: AgentName
    seats: tuple[SeatName, ...]
    policy: PolicyName
    learning: Learning

    @property
    def frozen(self) -> bool:
        return self.learning.every == 0

    def lora(self, seed: int) -> LoraSpec:
        learning = self.learning
        return LoraSpec(learning.rank, learning.alpha, learning.targets, derive(seed, "lora", self.name) % 2**31)


def check(scenario: Scenario, config: RunConfig, *, local: bool) -> None:
    """ConfigError with everything in which the configuration does not fit the scenario, or names what does not exist. `local`: the task
    server is of this installation, so it has the losses that are installed here and no others."""
    _, problems = _seating(scenario, config)
    problems += _learning_problems(scenario, config, local) + _barrier_problems(scenario, config)
    if problems:
        raise ConfigError("the configuration does not fit the scenario:\n  " + "\n  ".join(problems))


def roles(run: RunId, scenario: Scenario, config: RunConfig) -> tuple[Role, ...]:
    """The agents in the order of their first seat. ConfigError names unknown agents or seats, and seats nobody or two agents play."""
    seats_of, problems = _seating(scenario, config)
    if problems:
        raise ConfigError("the configuration does not fit the scenario:\n  " + "\n  ".join(problems))
    found = [
        Role(
            AgentName(name),
            tuple(SeatName(seat) for seat in seats),
            PolicyName(f"{run}/{name}"),
            config.learning_of(name),
        )
        for name, seats in seats_of.items()
    ]
    return tuple(sorted(found, key=lambda role: min(scenario.seats.index(seat) for seat in role.seats)))


def _seating(scenario: Scenario, config: RunConfig) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The seats of each agent, and everything that is wrong with agents, seats, update order and parameters."""
    problems = []
    seats_of: dict[str, tuple[str, ...]] = {}
    for name, agent in config.agents.items():
        if not NAME.fullmatch(name):
            problems.append(f"agents.{name!r}: expected {NAME_RULE}")
        if not agent.seats and name not in scenario.seats:
            problems.append(
                f"agents.{name}: no seat has this name; the seats are {', '.join(scenario.seats)} (or give seats = [...])"
            )
        seats_of[name] = agent.seats or (name,)
        problems += [
            f"agents.{name}.seats: unknown seat {seat!r}; the seats are {', '.join(scenario.seats)}"
            for seat in agent.seats
            if seat not in scenario.seats
        ]
    taken = [seat for seats in seats_of.values() for seat in seats]
    for seat in scenario.seats:
        if seat not in taken:
            if seat in seats_of:
                problems.append(f"seat {seat!r} is played by nobody: the agent of its name plays other seats")
            seats_of.setdefault(seat, (seat,))
        elif taken.count(seat) > 1:
            problems.append(f"seat {seat!r} is played by two agents; each seat belongs to one")
    if isinstance(config.update_order, tuple):
        ordered = [agent for group in config.update_order for agent in group]
        problems += [
            f"update_order: unknown agent {each!r}; the agents are {', '.join(seats_of)}"
            for each in ordered
            if each not in seats_of
        ]
        problems += [
            f"update_order: {each!r} is named {ordered.count(each)} times; an agent updates once in a round"
            for each in dict.fromkeys(ordered)
            if ordered.count(each) > 1
        ]
    try:
        scenario.bind(config.params)
    except ScenarioError as error:
        problems.append(f"params: {error}")
    return seats_of, problems


def every_learning(scenario: Scenario, config: RunConfig, key: str) -> list[tuple[str, Learning]]:
    """How each agent learns, with the place in the configuration where its value of `key` comes from."""
    found = []
    for name in dict.fromkeys((*scenario.seats, *config.agents)):
        own = config.agents[name].learning if name in config.agents else {}
        place = f"agents.{name}.learning.{key}" if key in own else f"learning.{key}"
        found.append((place, config.learning_of(name)))
    return found


def _learning_problems(scenario: Scenario, config: RunConfig, local: bool) -> list[str]:
    """Algorithms and losses that do not exist, each said once."""
    problems: dict[str, None] = {}
    for place, learning in every_learning(scenario, config, "algorithm"):
        try:
            make_algorithm(learning.algorithm, **learning.algorithm_options())
        except ValueError as error:
            problems[f"{place}: {error}"] = None
    for place, learning in every_learning(scenario, config, "loss") if local else ():
        try:
            find_loss(learning.correction)
        except UnknownLoss as error:
            problems[f"{place}: {error}"] = None
    return list(problems)


def _barrier_problems(scenario: Scenario, config: RunConfig) -> list[str]:
    """Quorums that cannot be reached, deadlines of barriers that do not exist, and promises that overlapping rounds cannot keep."""
    seats_of, _ = _seating(scenario, config)
    episodes = {"rollout_end": config.groups * config.group_size, "evaluate_end": len(held_out(scenario))}
    problems = []
    for barrier in BARRIERS:
        rule, come = config.barriers.at(barrier), episodes.get(barrier, len(seats_of))
        if rule.deadline and rule.straggler == "drop" and come and rule.quorum > come:
            what = "episodes" if barrier in episodes else "agents"
            problems.append(f"barriers.{barrier}: the quorum is {rule.quorum}, but the run has {come} {what}; lower it")
    if any(learning.lags for _, learning in every_learning(scenario, config, "max_lag")):
        given = [each for each in ("update_start", "update_end") if getattr(config.barriers, each).get("deadline")]
        problems += [f"barriers.{barrier}: {NO_UPDATE_BARRIER}" for barrier in given]
        if config.deterministic:
            problems.append(
                "deterministic: with max_lag the version that a rollout is played with depends on how long updates take; "
                "set max_lag to 0, or leave deterministic out"
            )
    return problems


def _rules(config: RunConfig, overlap: bool) -> tuple[BarrierRule, ...]:
    """The barriers that have a deadline. Where rollouts and updates `overlap`, there are none at updates."""
    found = []
    for phase, edge in product(Phase, Edge):
        rule = config.barriers.at(f"{phase}_{edge}")
        if rule.deadline and not (overlap and phase == Phase.UPDATE):
            found.append(BarrierRule(phase, edge, rule.deadline, Straggler(rule.straggler), rule.quorum))
    return tuple(found)


def run_spec(
    run: RunId, scenario: Scenario, config: RunConfig, agents: tuple[Role, ...], model: str, done: int = 0
) -> RunSpec:
    """What the coordinator is told about the run, of which `done` rounds have been played."""
    order: tuple[tuple[AgentName, ...], ...]
    if config.update_order == "together":
        order = ()
    elif config.update_order == "in_turn":
        order = tuple((role.name,) for role in agents)
    else:
        order = tuple(tuple(AgentName(agent) for agent in group) for group in config.update_order)
    return RunSpec(
        run=run,
        scenario=scenario.name,
        agents=tuple(
            AgentSpec(role.name, role.policy, role.learning.every, role.learning.max_lag if role.learning.lags else 0)
            for role in agents
        ),
        rounds=config.rounds,
        groups=config.groups,
        group_size=config.group_size,
        evaluations=len(held_out(scenario)),
        evaluate_every=config.evaluate_every,
        update_order=order,
        model=model,
        turn_deadline=config.turn_deadline,
        barriers=_rules(config, any(role.learning.lags for role in agents)),
        worker_deadline=config.worker_deadline,
        operation_deadline=config.operation_deadline,
        done=done,
    )


def casting(agents: tuple[Role, ...]) -> dict[SeatName, Cast]:
    """Which agent sits on each seat."""
    return {
        seat: Cast(role.name, role.policy, role.learning.max_tokens, role.learning.temperature)
        for role in agents
        for seat in role.seats
    }


def check_targets(agents: tuple[Role, ...], model: ModelCard) -> None:
    """ConfigError if an adapter names layers that the model does not have."""
    for role in agents:
        unknown = sorted(set(role.learning.targets) - set(model.lora_targets))
        if model.lora_targets and unknown:
            raise ConfigError(
                f"agent {role.name}: learning.targets names {', '.join(unknown)}; "
                f"{model.name} has {', '.join(model.lora_targets)}"
            )
