"""`opentinker keys`: make a key, and show the public half of the ones that are here. A secret is never printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tinker.protocol.values import Role

app = typer.Typer(help="Keys for connections between machines.", no_args_is_help=True)
Directory = Annotated[Path | None, typer.Option("--dir", help="Where keys lie (default: ~/.opentinker/keys).")]


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is: the name of its peer, or the beginning of that name.")],
    directory: Directory = None,
    role: Annotated[str, typer.Option(help=f"For the line to authorize it with: {', '.join(Role)}.")] = "host",
) -> None:
    """Make a key: NAME.key (secret) and NAME.pub. Prints the line for the other side's file of authorized keys."""
    from tinker.runtime.keys import KeyFileError, create_keys, default_directory

    place = directory or default_directory()
    try:
        unknown = [each for each in role.split(",") if each not in list(Role)]
        if unknown:
            raise KeyFileError(f"unknown role {unknown[0]!r}; there are {', '.join(Role)}")
        keys = create_keys(name, place)
    except KeyFileError as error:
        _refuse(error)
    typer.echo(f"made {place / name}.key (secret: keep it here) and {place / name}.pub", err=True)
    typer.echo(f"{keys.public} {role} {name}")


@app.command()
def show(
    which: Annotated[str, typer.Argument(metavar="[NAME|FILE]", help="One key (default: all).")] = "",
    directory: Directory = None,
) -> None:
    """Show public keys and their fingerprints, as logs name them."""
    from tinker.runtime.keys import KeyFileError, default_directory, read_keys
    from tinker.runtime.transport import fingerprint

    place = directory or default_directory()
    named = [Path(which) if "/" in which or which.endswith(".key") else place / f"{which}.key"]
    files = named if which else sorted(place.glob("*.key"))
    try:
        for file in files:
            public = read_keys(file).public
            typer.echo(f"{public} {file.stem} (fingerprint {fingerprint(public)})")
    except KeyFileError as error:
        _refuse(error)
    if not files:
        typer.echo(f"no keys in {place}; make one with `opentinker keys new NAME`", err=True)


def _refuse(error: Exception) -> Any:
    typer.echo(f"opentinker: {error}", err=True)
    raise typer.Exit(2)
