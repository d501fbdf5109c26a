"""`opentinker journal`: check, show and prune the journal of a coordinator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="journal", help="Look at the journal of a coordinator.", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="What `opentinker coordinator --journal` was given.")]


@app.command()
def check(directory: Directory) -> None:
    """Fold the journal again and compare: exit code 1 names the first entry that differs or is damaged."""
    from coordinator.app import history

    with _refusing():
        found = history.check(directory)
    print(
        f"{found.entries} entries in {found.segments} segments lead to the same states and messages; epoch {found.epoch}"
    )
    if found.torn:
        print(f"torn tail, cut off at the next start: {found.torn}")


@app.command()
def show(
    directory: Directory,
    run: Annotated[str, typer.Option(help="Only what concerns this run.")] = "",
) -> None:
    """Print what happened, one line for each input that did something."""
    from coordinator.app import history

    with _refusing():
        for line in history.show(directory, run):
            print(line)


@app.command()
def prune(
    directory: Directory,
    keep: Annotated[int, typer.Option(min=1, help="Newest segments to keep.")] = 1,
) -> None:
    """Remove old segments. A restart needs only the newest one."""
    from tinker.runtime.journal import prune as remove

    with _refusing():
        for path in remove(directory, keep):
            print(f"removed {path}")


@contextmanager
def _refusing() -> Iterator[None]:
    from tinker.runtime.journal import JournalError

    try:
        yield
    except JournalError as error:
        print(f"opentinker: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
