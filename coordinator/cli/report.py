"""`opentinker report`: a run as one page of HTML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory; the run may still go on.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page (default: RUN/report.html).")] = None,
) -> None:
    """Write a run's curves, timing, warnings and sample episodes as one page, and print where."""
    from coordinator.app.report import FILE, page
    from coordinator.app.rundir import RunDirectoryError, write_file
    from scenarios import RecordingError

    target = out if out is not None else run / FILE
    try:
        write_file(target, page(run).encode())
    except (RunDirectoryError, RecordingError) as error:
        print(f"opentinker: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    print(target)
