"""`opentinker`: run, coordinator, taskserver, host, status, drain, scenarios. What is refused is refused before anything is started.

Exit codes: 0 finished or drained; 1 the run failed; 2 wrong usage or configuration; 3 a process or the coordinator was lost; 130 cut off.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer

from coordinator.app.config import ConfigError, assignment, config_text, merged, read_toml, rollout_of
from coordinator.app.names import clashes
from coordinator.cli.author import check, doctor, new
from coordinator.cli.episodes import replay, show
from coordinator.cli.journal import app as journal_app
from coordinator.cli.keys import app as keys_app
from coordinator.cli.options import ADDRESS, KeyFile, ServerKey
from coordinator.cli.report import report
from coordinator.cli.watch import drain, status
from scenarios import ScenarioError, load_scenario
from tinker import __version__
from tinker.runtime.keys import KeyFileError
from tinker.runtime.transport import TransportError
from tinker.runtime.transport.security import SECRET

if TYPE_CHECKING:
    from coordinator.app.access import Keys
    from coordinator.app.local import RunRequest

app = typer.Typer(
    name="opentinker",
    help="Reinforcement learning for teams and opponents made of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(keys_app, name="keys")
app.add_typer(journal_app, name="journal")
app.command()(new)
app.command()(check)
app.command()(replay)
app.command()(show)
app.command()(report)
app.command()(doctor)
app.command()(status)
app.command()(drain)

Grace = Annotated[float, typer.Option(min=0.0, help="Seconds to drain when told to stop.")]
Log = Annotated[Literal["logfmt", "json"], typer.Option(help="How the log on stderr is written, one event a line.")]
AuthorizedFile = Annotated[
    Path | None,
    typer.Option("--authorized", metavar="FILE", help="Keys that may connect to us (OPENTINKER_AUTHORIZED)."),
]
Parent = Annotated[int, typer.Option(hidden=True, help="Leave when this process is gone.")]


def main() -> None:
    """The console command."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    found = clashes()
    if found:
        print("\n".join(found), file=sys.stderr)
        sys.exit(2)
    if any(SECRET.search(word) for word in sys.argv[1:]):  # other users of this machine can read it there
        print(
            "opentinker: a secret key on the command line is secret no more: make a new one, name its file",
            file=sys.stderr,
        )
        sys.exit(2)
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"opentinker {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    scenario: Annotated[
        str, typer.Argument(help="A name of `opentinker scenarios`, or path/to/file.py[:name] (not with --resume).")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Run directory (default: runs/<scenario>-<time>).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random in the run.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to play.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any key of the configuration.")] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One key, for example learning.lr=0.002 (repeatable)."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="`demo`, `smollm2`, a model directory, or a hub name.")] = None,
    engine: Annotated[str | None, typer.Option(help="torch, or scripted (no model, for trying things out).")] = None,
    rollout: Annotated[
        str | None, typer.Option(metavar="WHAT", help="What answers, if not the engine: sglang.")
    ] = None,
    coordinator: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Use a running coordinator and its task servers instead of starting them."
        ),
    ] = "",
    key: KeyFile = None,
    server_key: ServerKey = "",
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with a run that has stopped, from its newest checkpoint."),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whenever it is played, or resumed (slower).")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check everything that can be checked, and print the configuration.")
    ] = False,
) -> None:
    """Play and train a scenario."""
    from coordinator.app.access import Keys, UnsafeAddress, given_keys
    from coordinator.app.checks import check_address, checked
    from coordinator.app.local import RunRequest
    from coordinator.app.models import called
    from coordinator.app.resuming import resumed_request
    from coordinator.app.rundir import RunDirectory, RunDirectoryError

    keys = Keys()
    command = " ".join(["opentinker", *sys.argv[1:]])
    flags = {"seed": seed, "model": model, "engine": engine, "deterministic": deterministic or None}
    try:
        if coordinator:
            check_address(coordinator)
            keys = given_keys(key, server_key, None, os.environ)
            coordinator = keys.to(coordinator)
        elif key or server_key:
            raise ConfigError("--key and --server-key are for a run with --coordinator; one on this machine needs none")
        if resume is not None:
            others = [scenario, out, config, assign, check, *flags.values()]
            if any(other not in (None, "", False, []) for other in others):
                raise ConfigError(
                    "--resume goes on with the run as it was configured: only --rounds and --coordinator may be given"
                )
            request = resumed_request(resume, rounds, coordinator, command)
            raise typer.Exit(_play(request, keys) if request is not None else 0)
        if not scenario:
            raise ConfigError(
                "name a scenario (`opentinker scenarios` lists them), or a run to go on with: --resume RUN"
            )
        chosen = load_scenario(scenario)
        flags["rounds"] = rounds
        layers = [read_toml(config)] if config else []
        layers += [assignment(text) for text in assign or []]
        layers += [{"rollout": {"engine": rollout}}] if rollout is not None else []
        given = merged(*layers, {key: value for key, value in flags.items() if value is not None})
        resolved, path = checked(chosen, [given, {"scenario": scenario}], local=not coordinator)
        text = config_text(resolved)
        if check:
            print(text)
            return
        directory = RunDirectory.create(out, chosen.name, text)
    except (ConfigError, ScenarioError, RunDirectoryError, KeyFileError, TransportError, UnsafeAddress) as error:
        _refuse(error)
    named = called(str(given.get("model", ""))) if coordinator else path
    raise typer.Exit(_play(RunRequest(resolved, chosen, directory, coordinator, named, command), keys))


def _play(request: RunRequest, keys: Keys) -> int:
    """The exit code of a run that is played here and now."""
    from coordinator.app.console import watching
    from coordinator.app.local import play
    from coordinator.app.progress import Both
    from coordinator.app.reporting import Reporting

    with watching() as progress:
        exit = anyio.run(play, request, Both(Reporting(request.directory.path, progress), progress), keys)
    if exit.code and _elsewhere():  # else the report has said it
        print(f"{exit.reason}: {exit.detail}", file=sys.stderr)
    return exit.code


def _elsewhere() -> bool:
    """Whether standard error is read by somebody who does not see standard output (not a terminal, not the same file)."""
    try:
        out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # one of them is no file
        return True
    return not (sys.stdout.isatty() or os.path.samestat(out, err))


@app.command()
def coordinator(
    bind: Annotated[str, typer.Option(help="Where to listen (without keys: loopback or ipc only).")] = ADDRESS,
    name: Annotated[str, typer.Option(help="This coordinator's name.")] = "coordinator",
    http: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Serve health, metrics and status over HTTP here (loopback only)."),
    ] = "",
    journal: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep a journal here; started again with it, runs go on (default: none)."),
    ] = None,
    keep_segments: Annotated[
        int, typer.Option(min=0, help="Segments of the journal that stay, the newest included (0: all of them).")
    ] = 9,
    lease: Annotated[
        float, typer.Option(min=0.5, help="Seconds in which members have to be heard; twice as silent, they are lost.")
    ] = 15.0,
    grace: Grace = 10.0,
    log_format: Log = "logfmt",
    key: KeyFile = None,
    authorized: AuthorizedFile = None,
    parent: Parent = 0,
) -> None:
    """Run a coordinator daemon."""
    from coordinator.app.access import given_keys
    from coordinator.app.logs import log_to_stderr
    from coordinator.app.processes import CoordinatorSettings, run_coordinator

    log_to_stderr(log_format)
    try:
        keys = given_keys(key, "", authorized, os.environ)
    except KeyFileError as error:
        _refuse(error)
    _serve(
        run_coordinator(
            CoordinatorSettings(
                bind, name, parent, http, grace, keys, journal=journal, lease=lease, segments=keep_segments
            )
        )
    )


@app.command()
def taskserver(
    coordinator: Annotated[str, typer.Option(metavar="ADDRESS", help="The coordinator to join.")] = ADDRESS,
    model: Annotated[str, typer.Option(help="`demo`, `smollm2`, a model directory, or a hub name.")] = "demo",
    engine: Annotated[str, typer.Option(help="torch or scripted.")] = "torch",
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file whose [rollout] says what answers, if not the engine."),
    ] = None,
    name: Annotated[str, typer.Option(help="This task server's name (default: taskserver-<pid>).")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads of the engine (0: all cores).")] = 0,
    device: Annotated[
        str, typer.Option(help="Of the torch engine: cpu, cuda, cuda:1, ... (auto: a GPU, if any).")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 (auto: float32 on the CPU, else bfloat16).")] = "auto",
    reply: Annotated[list[str] | None, typer.Option(help="What the scripted engine answers with (repeatable).")] = None,
    spool: Annotated[
        Path | None, typer.Option(help="Where adapters and batches lie (default: a temporary directory).")
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:CAPACITY]", help="Offer only these pools (repeatable; default rollout:256, forward, update)."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Commit what policies have learned here; started again with it, runs go on."),
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to serve bundles, as hosts on other machines reach it.")
    ] = "tcp://127.0.0.1:0",
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve health and metrics over HTTP here (loopback only).")
    ] = "",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever arrives when (slower; one thread).")
    ] = False,
    grace: Grace = 10.0,
    log_format: Log = "logfmt",
    key: KeyFile = None,
    server_key: ServerKey = "",
    authorized: AuthorizedFile = None,
    parent: Parent = 0,
) -> None:
    """Run a task server: rollout, forward and update pools on one model."""
    from coordinator.app.access import given_keys
    from coordinator.app.logs import log_to_stderr
    from coordinator.app.models import model_directory
    from coordinator.app.processes import TaskServerSettings, pools_named, run_taskserver

    log_to_stderr(log_format)
    try:
        if engine not in ("torch", "scripted"):
            raise ConfigError(f"--engine is {engine!r}; choose torch or scripted")
        rollout = rollout_of(read_toml(config) if config else {}, engine)
        directory = model_directory(model)
        pools = pools_named(pool or [])
        keys = given_keys(key, server_key, authorized, os.environ)
    except (ConfigError, KeyFileError) as error:
        _refuse(error)
    settings = TaskServerSettings(
        coordinator=coordinator,
        name=name or f"{keys.name or 'taskserver'}-{os.getpid()}",
        model=directory,
        engine=engine,
        rollout=rollout,
        threads=threads,
        device=device,
        dtype=dtype,
        replies=tuple(reply or ("yes", "no")),
        spool=spool,
        state=state,
        pools=pools,
        parent=parent,
        grace=grace,
        keys=keys,
        data=data,
        deterministic=deterministic,
        http=http,
    )
    _serve(run_taskserver(settings))


@app.command()
def host(
    scenario: Annotated[str, typer.Argument(help="The run's scenario: a name, or path/to/file.py[:name].")],
    run: Annotated[str, typer.Option(metavar="RUN", help="The run to play for, as `opentinker status` names it.")],
    coordinator: Annotated[str, typer.Option(metavar="ADDRESS", help="The coordinator of the run.")] = ADDRESS,
    capacity: Annotated[int, typer.Option(min=1, help="Episodes to play at the same time.")] = 64,
    name: Annotated[str, typer.Option(help="This host's name (default: host-<pid>).")] = "",
    grace: Grace = 10.0,
    log_format: Log = "logfmt",
    key: KeyFile = None,
    server_key: ServerKey = "",
    parent: Parent = 0,
) -> None:
    """Play episodes for somebody's run, and learn nothing."""
    from coordinator.app.access import UnsafeAddress, given_keys
    from coordinator.app.checks import check_address
    from coordinator.app.logs import log_to_stderr
    from coordinator.app.processes import HostSettings, run_host

    log_to_stderr(log_format)
    try:
        check_address(coordinator)
        keys = given_keys(key, server_key, None, os.environ)
        chosen, address = load_scenario(scenario), keys.to(coordinator)
    except (ConfigError, ScenarioError, KeyFileError, TransportError, UnsafeAddress) as error:
        _refuse(error)
    named = name or f"{keys.name or 'host'}-{os.getpid()}"
    exit = anyio.run(run_host, HostSettings(address, run, chosen, named, capacity, parent, grace, keys))
    if exit.code:
        print(f"opentinker: {exit.detail}", file=sys.stderr)
    raise typer.Exit(exit.code)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="One of its agents.")],
    merge: Annotated[bool, typer.Option("--merge", help="A plain model: the adapter merged into the base.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to (default: RUN/export/AGENT-vVERSION).")] = None,
    version: Annotated[int | None, typer.Option(help="Which version (default: the newest).")] = None,
    model: Annotated[str, typer.Option(help="The base model, if it is not where the run found it.")] = "",
) -> None:
    """Write what an agent has learned as a PEFT adapter, or as a plain Hugging Face model."""
    from coordinator.app.export import export as write
    from coordinator.app.rundir import RunDirectoryError

    try:
        print(write(run, agent, out, version, model, merge))
    except (ConfigError, RunDirectoryError) as error:
        _refuse(error)


@app.command()
def scenarios() -> None:
    """List the scenarios of the library, one line each."""
    from scenarios.library import library

    width = max(map(len, library()))
    for name, each in library().items():
        print(f"{name:{width}}  {each.description}  [{', '.join(each.seats)}]")


def _serve(daemon: Coroutine[Any, Any, None]) -> None:
    """Run a daemon to its end; what is the operator's to mend is one line and exit code 2."""
    from coordinator.app.access import UnsafeAddress
    from tinker.engines.engine import EngineError
    from tinker.pools.commits import CommitUnwritable
    from tinker.runtime.journal import JournalError
    from tinker.runtime.transport import TransportError
    from tinker.server.taskserver import NotWelcome, TaskServerError

    async def run() -> None:
        await daemon

    try:
        anyio.run(run)
    except* (
        UnsafeAddress,
        KeyFileError,
        TransportError,
        EngineError,
        NotWelcome,
        JournalError,
        CommitUnwritable,
    ) as group:
        _refuse(group)
    except* TaskServerError as group:
        _refuse(group, code=3)


def _refuse(error: BaseException, code: int = 2) -> Any:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    print(f"opentinker: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
