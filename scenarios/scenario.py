"""What a scenario is: an `async def` that plays one episode at a table, with everything declared about it checked at decoration.

```python
@scenario("ann", "bob", version=1)
async def auction(table: Table, *, highest: int = 100) -> Scores:
    "Private values, sealed bids, second price."
```
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agents.players.scripted import Script
from scenarios.errors import ScenarioError
from scenarios.parameters import Parameter, bind, closest, read_parameters

if TYPE_CHECKING:
    from scenarios.table import Table

Scores = Mapping[str, float]
ScenarioFunction = Callable[..., Awaitable[Scores]]
ScriptedFunction = Script  # (heard, prompt, rng) -> reply

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,59}")  # of scenarios, seats and agents
NAME_RULE = "at most 60 letters, digits, '_' or '-', a letter first"


@dataclass(frozen=True, slots=True)
class ForfeitScores:
    """The scores of an episode that an uncaught `Forfeit` ended: the seat that forfeited, and everybody else."""

    own: float = -1.0
    others: float = 0.0

    def scores(self, seats: Sequence[str], forfeiter: str) -> dict[str, float]:
        """One score per seat."""
        return {seat: self.own if seat == forfeiter else self.others for seat in seats}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out evaluation: fixed seeds of its own, scripted opponents on some seats, the learners on the rest.

    `measure`: the name of the measure (`table.measure`) that sums it up.
    """

    name: str
    episodes: int
    measure: str
    opponents: Mapping[str, ScriptedFunction] = field(default_factory=dict)
    params: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A scenario and all that was declared about it. Made by `@scenario`; calling it plays its function at a table."""

    name: str
    seats: tuple[str, ...]
    version: int
    function: ScenarioFunction
    parameters: tuple[Parameter, ...]
    description: str
    retries: int = 0
    forfeit: ForfeitScores = ForfeitScores()
    learn_from_forfeits: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    headline: str = ""
    baselines: Mapping[str, ScriptedFunction] = field(default_factory=dict)
    private: tuple[str, ...] = ()

    def bind(self, params: Mapping[str, object]) -> dict[str, object]:
        """Every parameter with its given or default value; ScenarioError names what is unknown or ill-typed, and what is allowed."""
        return bind(f"scenario {self.name!r}", self.parameters, params)

    def __call__(self, table: Table, **params: object) -> Awaitable[Scores]:
        return self.function(table, **params)


def scenario(
    *seats: str,
    version: int,
    name: str = "",
    retries: int = 0,
    forfeit: ForfeitScores = ForfeitScores(),
    learn_from_forfeits: bool = False,
    defaults: Mapping[str, Any] | None = None,
    evaluations: Sequence[Evaluation] = (),
    headline: str = "",
    baselines: Mapping[str, ScriptedFunction] | None = None,
    private: Sequence[str] = (),
) -> Callable[[ScenarioFunction], Scenario]:
    """Declare an `async def (table, *, parameter: type = default) -> Scores` as a scenario with these seats, in this order.

    `version` rises whenever the rules change, because a recording replays only under the rules that made it. `retries`: how often
    a seat may try again after a reply that did not parse. `name`: the function's name unless given. `private`: seats that are shown
    something before they first act that no other seat may see; `opentinker check` looks for leaks.
    """

    def declare(function: ScenarioFunction) -> Scenario:
        chosen = name or getattr(function, "__name__", "")
        owner = f"scenario {chosen!r}"
        _check_function(owner, function)
        declared = Scenario(
            name=chosen,
            seats=seats,
            version=version,
            function=function,
            parameters=read_parameters(function),
            description=(inspect.getdoc(function) or "").strip().partition("\n")[0],
            retries=retries,
            forfeit=forfeit,
            learn_from_forfeits=learn_from_forfeits,
            defaults=copy.deepcopy(dict(defaults or {})),
            evaluations=tuple(evaluations),
            headline=headline,
            baselines=dict(baselines or {}),
            private=tuple(private),
        )
        _check_seats(owner, seats)
        _check_numbers(owner, declared)
        _check_evaluations(owner, declared)
        _check_players(f"{owner}: baselines", declared.baselines, seats)
        for seat in declared.private:
            _check_seat(f"{owner}: private", seat, seats)
        return declared

    return declare


def _check_function(owner: str, function: ScenarioFunction) -> None:
    if not inspect.iscoroutinefunction(function):
        raise ScenarioError(f"{owner} is not an `async def`; a scenario awaits its seats")
    if not (inspect.getdoc(function) or "").strip():
        raise ScenarioError(f"{owner} has no docstring; its first line is what `opentinker scenarios` shows")


def _check_seats(owner: str, seats: Sequence[object]) -> None:
    if not seats:
        raise ScenarioError(f"{owner} has no seats; name them: @scenario('ann', 'bob', version=1)")
    for seat in seats:
        if not isinstance(seat, str) or not NAME.fullmatch(seat):
            raise ScenarioError(f"{owner}: {seat!r:.200} is no seat name; expected {NAME_RULE}")
    for seat in sorted({str(seat) for seat in seats if seats.count(seat) > 1}):
        raise ScenarioError(f"{owner} names the seat {seat!r} twice")


def _check_numbers(owner: str, declared: Scenario) -> None:
    if not NAME.fullmatch(declared.name):
        raise ScenarioError(f"{owner}: a scenario's name is {NAME_RULE}")
    if type(declared.version) is not int or declared.version < 1:
        raise ScenarioError(f"{owner}: version is {declared.version!r}; expected a whole number from 1")
    if type(declared.retries) is not int or declared.retries < 0:
        raise ScenarioError(f"{owner}: retries is {declared.retries!r}; expected a whole number from 0")
    if not isinstance(declared.forfeit, ForfeitScores):
        raise ScenarioError(f"{owner}: forfeit is {declared.forfeit!r}; expected ForfeitScores(own=..., others=...)")
    if not (math.isfinite(declared.forfeit.own) and math.isfinite(declared.forfeit.others)):
        raise ScenarioError(f"{owner}: forfeit scores must be finite numbers, not {declared.forfeit}")


def _check_evaluations(owner: str, declared: Scenario) -> None:
    names = [evaluation.name for evaluation in declared.evaluations]
    for evaluation in declared.evaluations:
        place = f"{owner}: evaluation {evaluation.name!r}"
        if not evaluation.name or names.count(evaluation.name) > 1:
            raise ScenarioError(f"{place}: every evaluation needs a name of its own")
        if type(evaluation.episodes) is not int or evaluation.episodes < 1:
            raise ScenarioError(f"{place} plays {evaluation.episodes!r} episodes; expected a whole number from 1")
        if not evaluation.measure:
            raise ScenarioError(f"{place} names no measure; name one that the scenario gives to table.measure")
        _check_players(f"{place}: opponents", evaluation.opponents, declared.seats)
        if set(evaluation.opponents) == set(declared.seats):
            raise ScenarioError(f"{place} has an opponent on every seat; leave at least one to a learner")
        try:
            declared.bind(evaluation.params)
        except ScenarioError as error:
            raise ScenarioError(f"{place}: {error}") from None


def _check_players(place: str, players: Mapping[str, ScriptedFunction], seats: Sequence[str]) -> None:
    for seat, player in players.items():
        _check_seat(place, seat, seats)
        if not callable(player):
            raise ScenarioError(
                f"{place}: the player of {seat!r} is {player!r}; expected a function (heard, prompt, rng) -> str"
            )


def _check_seat(place: str, seat: str, seats: Sequence[str]) -> None:
    if seat not in seats:
        raise ScenarioError(f"{place} names the seat {seat!r}{closest(seat, seats)}; the seats are {', '.join(seats)}")
