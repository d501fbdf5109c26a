"""`opentinker status` and `opentinker drain`: one question to a coordinator, and its answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from coordinator.app.config import ConfigError
from coordinator.app.snapshot import Snapshot
from coordinator.cli.options import ADDRESS, KeyFile, ServerKey
from tinker.runtime.keys import KeyFileError
from tinker.runtime.transport import TransportError

if TYPE_CHECKING:
    from coordinator.app.access import Keys

STATUS = "127.0.0.1:7655"
FOLLOW = 2.0  # seconds between two looks of `status --follow`


def status(
    http: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help=f"The coordinator's HTTP address, or a file with the first line it printed (default: {STATUS}).",
        ),
    ] = "",
    coordinator: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Ask the coordinator itself here, instead of its page.")
    ] = "",
    key: KeyFile = None,
    server_key: ServerKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as one line of JSON.")] = False,
    follow: Annotated[bool, typer.Option(help=f"Print again every {FOLLOW:.0f} seconds, until Ctrl-C.")] = False,
) -> None:
    """Show who a coordinator waits for, and why."""
    from coordinator.app.bounded import SNAPSHOT
    from coordinator.cli.status import NoAnswer, described

    try:
        ask = _asking(http, coordinator, key, server_key)
        while True:
            now = ask()
            print(SNAPSHOT.dump_json(now).decode() if as_json else "\n".join(described(now)), flush=True)
            if not follow:
                return
            time.sleep(FOLLOW)
            if not as_json:
                print("\n---\n")
    except NoAnswer as error:
        _end(error, 3)
    except KeyboardInterrupt:
        return


def drain(
    coordinator: Annotated[str, typer.Option(metavar="ADDRESS", help="The coordinator to drain.")] = ADDRESS,
    key: KeyFile = None,
    server_key: ServerKey = "",
) -> None:
    """Let a coordinator begin nothing more and end, as SIGTERM does."""
    from coordinator.cli.status import NoAnswer, asked
    from tinker.protocol.to_daemon import Drain

    keys, address = _to(coordinator, key, server_key)
    try:
        answer = asked(address, keys, Drain())
    except NoAnswer as error:
        _end(error, 3)
    print(f"it drains: {answer.reason}")


def _asking(http: str, coordinator: str, key: Path | None, server_key: str) -> Callable[[], Snapshot]:
    """How to look once."""
    from coordinator.cli.status import fetch, page, watched

    if http and coordinator:
        _end(ConfigError("--http asks a page, --coordinator the coordinator itself: give one of them"), 2)
    if not coordinator:
        if key or server_key:
            _end(ConfigError("--key and --server-key are for --coordinator; pages need none"), 2)
        url = page(http or STATUS)
        return lambda: fetch(url)
    keys, address = _to(coordinator, key, server_key)
    return lambda: watched(address, keys)


def _to(coordinator: str, key: Path | None, server_key: str) -> tuple[Keys, str]:
    """Our keys, and the address with the coordinator's."""
    from coordinator.app.access import UnsafeAddress, given_keys
    from coordinator.app.checks import check_address

    try:
        check_address(coordinator)
        keys = given_keys(key, server_key, None, os.environ)
        return keys, keys.to(coordinator)
    except (ConfigError, KeyFileError, TransportError, UnsafeAddress) as error:
        _end(error, 2)


def _end(error: Exception, code: int) -> NoReturn:
    print(f"opentinker: {error}", file=sys.stderr)
    raise typer.Exit(code)
