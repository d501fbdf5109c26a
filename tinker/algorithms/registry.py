"""Algorithms by name: what a scenario or a run's configuration may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinker.algorithms.credit import Algorithm
from tinker.algorithms.grpo import Grpo
from tinker.algorithms.reinforce import Reinforce

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {Grpo.name: Grpo, Reinforce.name: Reinforce}


def make_algorithm(name: str, **options: Any) -> Algorithm:
    """A new algorithm with its own state. ValueError if there is none of that name, or it does not take these options."""
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}; choose one of {', '.join(sorted(ALGORITHMS))}")
    try:
        return ALGORITHMS[name](**options)
    except TypeError as error:
        raise ValueError(f"algorithm {name!r} does not take the options {sorted(options)} ({error})") from error
