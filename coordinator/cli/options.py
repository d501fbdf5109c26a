"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ADDRESS = "tcp://127.0.0.1:7654"
KeyFile = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Our own secret key (OPENTINKER_KEY).")]
ServerKey = Annotated[
    str,
    typer.Option(
        "--server-key", metavar="PUBLICKEY|FILE", help="The coordinator's public key (OPENTINKER_SERVER_KEY)."
    ),
]
