"""What `@scenario` accepts and refuses, and how parameters are bound."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from scenarios import Evaluation, ForfeitScores, ScenarioError, Scores, Table, scenario


async def plain(table: Table) -> Scores:
    """Nothing happens."""
    return {"ann": 0.0, "bob": 0.0}


async def with_parameters(
    table: Table,
    *,
    rounds: int = 3,
    price: float = 1,
    fast: bool = False,
    style: Literal["loud", "quiet"] = "quiet",
    words: tuple[str, ...] = ("a",),
    cap: int | None = None,
) -> Scores:
    """Parameters of every kind.

    More of the docstring."""
    return {}


def bot(heard: object, prompt: str, rng: object) -> str:
    return ""


def test_a_declared_scenario_holds_what_was_declared() -> None:
    declared = scenario(
        "ann",
        "bob",
        version=2,
        retries=1,
        forfeit=ForfeitScores(own=-2.0),
        evaluations=[Evaluation("held-out", 4, "success", opponents={"bob": bot})],
        headline="success",
        baselines={"ann": bot},
        defaults={"rounds": 60},
    )(with_parameters)
    assert (declared.name, declared.seats, declared.version, declared.retries) == (
        "with_parameters",
        ("ann", "bob"),
        2,
        1,
    )
    assert declared.description == "Parameters of every kind."
    assert declared.forfeit.scores(declared.seats, "bob") == {"ann": 0.0, "bob": -2.0}
    assert [parameter.name for parameter in declared.parameters] == [
        "rounds",
        "price",
        "fast",
        "style",
        "words",
        "cap",
    ]


def test_defaults_are_a_copy_that_the_author_can_no_longer_change() -> None:
    defaults = {"learning": {"lr": 1.0}}
    declared = scenario("ann", version=1, defaults=defaults)(plain)
    defaults["learning"]["lr"] = 2.0
    assert declared.defaults["learning"]["lr"] == 1.0


@pytest.mark.parametrize(
    ("seats", "options", "named"),
    [
        ((), {}, "no seats"),
        (("ann", "bob", "ann"), {}, "'ann' twice"),
        (("ann", "b b"), {}, "'b b'"),
        (("ann", "b" * 61), {}, f"{'b' * 61}' is no seat name; expected at most 60 letters"),
        (("ann",), {"version": 0}, "version is 0"),
        (("ann",), {"version": True}, "version is True"),
        (("ann",), {"retries": -1}, "retries is -1"),
        (("ann",), {"forfeit": -1.0}, "expected ForfeitScores"),
        (("ann",), {"forfeit": ForfeitScores(own=float("nan"))}, "finite"),
        (("ann",), {"name": "a b"}, "'a b'"),
        (("ann", "bob"), {"baselines": {"anne": bot}}, "did you mean 'ann'"),
        (("ann", "bob"), {"baselines": {"ann": "bot"}}, "expected a function"),
        (("ann", "bob"), {"evaluations": [Evaluation("e", 1, "m", {"cleo": bot})]}, "'cleo'"),
        (("ann",), {"evaluations": [Evaluation("e", 1, "m", {"ann": bot})]}, "leave at least one"),
        (("ann",), {"evaluations": [Evaluation("e", 0, "m")]}, "0 episodes"),
        (("ann",), {"evaluations": [Evaluation("e", 1, "")]}, "no measure"),
        (("ann",), {"evaluations": [Evaluation("e", 1, "m"), Evaluation("e", 1, "m")]}, "a name of its own"),
        (
            ("ann",),
            {"evaluations": [Evaluation("e", 1, "m", params={"rounds": 1})]},
            "'e': scenario 'plain' has no parameter",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(seats: tuple[str, ...], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ScenarioError, match=named):
        scenario(*seats, **{"version": 1, **options})(plain)


def test_names_may_have_60_characters() -> None:
    assert scenario("a" * 60, version=1, name="n" * 60)(plain).seats == ("a" * 60,)


def test_a_function_that_is_not_async_is_refused() -> None:
    def sync(table: Table) -> Scores:
        """Not async."""
        return {}

    with pytest.raises(ScenarioError, match="async def"):
        scenario("ann", version=1)(sync)  # type: ignore[arg-type]


def test_a_function_without_a_docstring_is_refused() -> None:
    async def silent(table: Table) -> Scores:
        return {}

    with pytest.raises(ScenarioError, match="no docstring"):
        scenario("ann", version=1)(silent)


async def _positional(table: Table, rounds: int = 1) -> Scores:
    """."""
    return {}


async def _starred(table: Table, **rest: int) -> Scores:
    """."""
    return {}


async def _required(table: Table, *, rounds: int) -> Scores:
    """."""
    return {}


async def _unknown_type(table: Table, *, rounds: list[int] = []) -> Scores:  # noqa: B006
    """."""
    return {}


async def _wrong_default(table: Table, *, rounds: int = "3") -> Scores:  # type: ignore[assignment]
    """."""
    return {}


async def _unreadable(table: Table, *, rounds: Nowhere = 3) -> Scores:  # type: ignore[name-defined]  # noqa: F821
    """."""
    return {}


@pytest.mark.parametrize("function", [_positional, _starred, _required, _unknown_type, _wrong_default, _unreadable])
def test_parameters_are_keyword_only_with_a_simple_type_and_a_default(function: Any) -> None:
    with pytest.raises(ScenarioError, match=r"rounds|rest"):
        scenario("ann", version=1)(function)


def test_bind_gives_every_parameter_in_the_type_the_scenario_expects() -> None:
    declared = scenario("ann", version=1)(with_parameters)
    bound = declared.bind({"price": 2, "words": ["x", "y"], "cap": 4})
    assert bound == {"rounds": 3, "price": 2.0, "fast": False, "style": "quiet", "words": ("x", "y"), "cap": 4}
    assert type(bound["price"]) is float


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"round": 1}, "no parameter 'round' .did you mean 'rounds'.*it has: rounds, price"),
        ({"rounds": "3"}, "'rounds' is '3'; allowed is int"),
        ({"rounds": True}, "'rounds' is True"),
        ({"fast": 1}, "'fast' is 1; allowed is bool"),
        ({"price": float("nan")}, "'price' is nan"),
        ({"style": "shrill"}, "one of 'loud', 'quiet'"),
        ({"words": "abc"}, "a list of str"),
        ({"cap": 1.5}, "int or None"),
    ],
)
def test_bind_refuses_by_name_and_says_what_is_allowed(given: dict[str, object], named: str) -> None:
    declared = scenario("ann", version=1)(with_parameters)
    with pytest.raises(ScenarioError, match=named):
        declared.bind(given)
