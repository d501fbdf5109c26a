"""What the hosts of a run must agree on, and what a further host needs to play its episodes exactly as the learner host would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.app.cast import Role, casting
from coordinator.app.config import ConfigError, RunConfig
from scenarios import Scenario, ScenarioError
from scenarios.episode import Limits
from scenarios.host import Cast, Production
from scenarios.parameters import describe
from tinker.protocol.to_coordinator import RunSpec
from tinker.protocol.to_host import Enlisted
from tinker.protocol.values import AgentName, PolicyName, RunId, SeatName, Term
from tinker.tokens import ChatTemplate


def terms(scenario: Scenario) -> tuple[Term, ...]:
    """What a host's scenario is: two that say the same play the same episodes (their authors raise the version, else they do not)."""
    held_out = [(each.name, each.episodes, each.measure, sorted(each.opponents)) for each in scenario.evaluations]
    said = {
        "version": scenario.version,
        "seats": scenario.seats,
        "parameters": {each.name: (describe(each.kind), repr(each.default)) for each in scenario.parameters},
        "retries": scenario.retries,
        "forfeit": str(scenario.forfeit),
        "learn_from_forfeits": scenario.learn_from_forfeits,
        "evaluations": held_out,
    }
    return tuple(Term(name, json.dumps(value, sort_keys=True, default=str)) for name, value in said.items())


class CastSetup(BaseModel):
    """One seat (`scenarios.host.Cast`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: str
    policy: str
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(gt=0)]


class Setup(BaseModel):
    """What the learner host tells further hosts about its run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    cast: Mapping[str, CastSetup]
    params: Mapping[str, Any]
    episode_deadline: Annotated[float, Field(gt=0)]
    turn_deadline: Annotated[float, Field(gt=0)]


def for_further_hosts(spec: RunSpec, scenario: Scenario, config: RunConfig, agents: tuple[Role, ...]) -> RunSpec:
    """The specification with what others need to play with us."""
    return replace(spec, capacity=config.concurrency, terms=terms(scenario), setup=setup(config, agents))


def setup(config: RunConfig, agents: tuple[Role, ...]) -> bytes:
    """As it travels."""
    said = {
        "seed": config.seed,
        "cast": {seat: asdict(each) for seat, each in casting(agents).items()},
        "params": dict(config.params),
        "episode_deadline": config.episode_deadline,
        "turn_deadline": config.turn_deadline,
    }
    return json.dumps(said, default=str).encode()


def production(
    run: RunId, scenario: Scenario, config: RunConfig, agents: tuple[Role, ...], template: ChatTemplate, context: int
) -> Production:
    """The learner host's own."""
    return Production(
        run,
        config.seed,
        scenario,
        casting(agents),
        template,
        context,
        config.params,
        Limits(deadline=config.episode_deadline),
        config.turn_deadline,
        config.concurrency,
    )


def further_production(enlisted: Enlisted, scenario: Scenario, template: ChatTemplate, capacity: int) -> Production:
    """A further host's. ConfigError if what the learner host says cannot be played here."""
    try:
        given = Setup.model_validate_json(enlisted.setup)
        scenario.bind(given.params)
    except (ValidationError, ScenarioError) as error:
        raise ConfigError(
            f"the learner host of run {enlisted.run!r} says what this host cannot play ({error}); "
            "run the same version of opentinker and of the scenario on both"
        ) from error
    cast = {
        SeatName(seat): Cast(AgentName(each.agent), PolicyName(each.policy), each.max_tokens, each.temperature)
        for seat, each in given.cast.items()
    }
    if set(cast) != set(scenario.seats):
        raise ConfigError(f"run {enlisted.run!r} casts {', '.join(cast)}; the seats are {', '.join(scenario.seats)}")
    return Production(
        enlisted.run,
        given.seed,
        scenario,
        cast,
        template,
        enlisted.model.context,
        given.params,
        Limits(deadline=given.episode_deadline),
        given.turn_deadline,
        capacity,
    )
