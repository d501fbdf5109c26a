"""The five top-level package names of this project, and a check that no other installed distribution provides them too.

Two distributions that install the same package overwrite each other's files without a word; what then runs is a mixture of both.
"""

from __future__ import annotations

from importlib.metadata import packages_distributions

DISTRIBUTION = "opentinker"
PACKAGES = ("agents", "coordinator", "envs", "scenarios", "tinker")


def clashes() -> list[str]:
    """One message for each of our packages that another distribution provides too, with what to do; [] if all is well."""
    providers = packages_distributions()
    found = []
    for package in PACKAGES:
        others = sorted({name for name in providers.get(package, ()) if name.lower() != DISTRIBUTION})
        if others:
            found.append(
                f"the package {package!r} is also provided by the installed distribution {', '.join(others)}; the two overwrite "
                f"each other's files. Install {DISTRIBUTION} into an environment of its own (`make venv`), or remove the other "
                f"one: `pip uninstall {' '.join(others)}`, then install {DISTRIBUTION} again"
            )
    return found
