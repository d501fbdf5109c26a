"""`opentinker run`: one command, the whole system. Starts what is missing, plays the run, leaves nothing behind but the run directory.

Without `--coordinator` a coordinator and a task server are started as processes of this machine and stopped at the end; this process is the
host. With it, this process is only the host. The first Ctrl-C drains (what is finished is kept, exit code 0), the second ends at once.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex

import anyio

from agents.learner import Learner, LearnerOptions
from coordinator.app import findings, metrics
from coordinator.app.access import Keys
from coordinator.app.bundles import HostBundles
from coordinator.app.cast import Role, check_targets, roles, run_spec
from coordinator.app.checkpoints import Checkpoint
from coordinator.app.config import ConfigError, RunConfig
from coordinator.app.curves import draw
from coordinator.app.interrupt import DRAIN, Interrupt
from coordinator.app.launch import READY, Child, ProcessDied, first_dead, keep_running, ready
from coordinator.app.production import for_further_hosts, production
from coordinator.app.progress import AgentFacts, Progress, RunFacts, RunResult
from coordinator.app.run_loop import play_rounds
from coordinator.app.rundir import Exit, RunDirectory, RunDirectoryError, blamed
from coordinator.app.summary import summary
from coordinator.app.training import Training
from coordinator.app.updating import Agent
from scenarios import Scenario
from scenarios.transcript import render
from tinker.algorithms.registry import make_algorithm
from tinker.client import Client, ClientError, CoordinatorLost, Event, RunOver
from tinker.protocol.to_any import Draining
from tinker.protocol.to_coordinator import Hello
from tinker.protocol.to_host import CoordinatorLoad, Missing, Queued
from tinker.protocol.values import PeerName, RunId
from tinker.protocol.values import Role as PeerRole
from tinker.runtime.bulk import BULK_LIMITS, BulkClient, BulkError, BundleStore, machine_id
from tinker.runtime.clock import Clock, MonotonicClock
from tinker.runtime.transport import Transport, ZmqTransport
from tinker.tokens import ChatTemplate, Tokenizer

QUICK = ("--grace", "5")  # our daemons have nothing to finish when we stop them: the run is over
TASKSERVER = "taskserver"
JOIN = 15.0  # seconds a coordinator may take to welcome us


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What was asked for. `coordinator`: "" starts one. `model`: a checked directory ("" with a coordinator: whatever it holds).
    `checkpoint`: where a run that was played before goes on, `rows`: its metrics so far."""

    config: RunConfig
    scenario: Scenario
    directory: RunDirectory
    coordinator: str = ""
    model: str = ""
    command: str = ""
    checkpoint: Checkpoint | None = None
    rows: Sequence[metrics.Row] = ()


async def play(request: RunRequest, progress: Progress, keys: Keys = Keys()) -> Exit:  # noqa: B008 (it is frozen)
    """Play one run from start to end. Never raises for anything that can go wrong with it: the exit says what did."""
    name = f"{keys.name or 'host'}-{os.getpid()}"
    return await Play(request, progress, transport=ZmqTransport(keys.security()), name=name).run()


@dataclass(slots=True)
class Play:
    """One run from start to end, in one event loop. `name` and `machine`: what this host is to the coordinator."""

    request: RunRequest
    progress: Progress
    clock: Clock = field(default_factory=MonotonicClock)
    transport: Transport = field(default_factory=ZmqTransport)
    name: str = field(default_factory=lambda: f"host-{os.getpid()}")
    machine: str = field(default_factory=machine_id)
    draw: Callable[[Sequence[Mapping[str, object]], str], bytes | None] = draw
    interrupt: Interrupt = field(default_factory=Interrupt)
    facts: RunFacts | None = None
    drained: str = ""  # why the coordinator stops, once it has said so

    async def run(self) -> Exit:
        """Play the run and write everything about its end."""
        began = self.clock.now()
        exit = Exit("interrupted", 130, "it was cut off before anything was trained")
        with self.interrupt:
            with self.interrupt.scope:
                exit = await self._outcome()
            if self.interrupt.scope.cancelled_caught and self.interrupt.training is not None:
                exit = Exit("interrupted", 130, f"the drain was cut off after {DRAIN:.0f} s; finished rounds are kept")
        self._finish(exit, self.clock.now() - began)
        return exit

    async def _outcome(self) -> Exit:
        try:
            async with AsyncExitStack() as stack:
                place = tempfile.TemporaryDirectory(prefix="opentinker-", ignore_cleanup_errors=True)
                self.interrupt.spool = spool = Path(stack.enter_context(place))
                address = self.request.coordinator or await self._start_daemons(stack, spool)
                return await self._host(address, spool)
        except (
            ClientError,
            ProcessDied,
            BulkError,
        ) as error:  # a coordinator that has ended the run has removed its bundles, too
            if self.drained:
                return Exit("interrupted", 0, f"{self.drained}; finished rounds are kept ({error})")
            return Exit("failed", 1, str(error)) if isinstance(error, BulkError) else _failed(error)
        except (RunDirectoryError, ConfigError) as error:
            return Exit("failed", 1, str(error))
        except Exception:  # a fault of this program: the run's directory must say so too
            return Exit("crashed", 1, traceback.format_exc())

    async def _start_daemons(self, stack: AsyncExitStack, spool: Path) -> str:
        """Coordinator first, then the task server; both are stopped when the stack is left."""
        logs = self.request.directory.path / "logs"
        with blamed(logs):
            logs.mkdir(exist_ok=True)
        config, children = self.request.config, self.interrupt.children
        self.progress.note(f"starting a coordinator and a task server ({config.engine} engine, model {config.model})")
        patience, other = READY, config.rollout.engine != ""
        if other:
            self.progress.note(f"answers come from {config.rollout.engine}; servers of its own take a while to start")
            patience += config.rollout.launch.ready

        async def start(name: str, arguments: list[str]) -> str:
            child = await Child.start(name, arguments, logs / f"{name}.log", patience)
            children.append(child)
            stack.push_async_callback(child.stop)
            return await ready(child, children, patience)

        address = await start("coordinator", ["coordinator", "--bind", "tcp://127.0.0.1:0", *QUICK])
        arguments = ["--coordinator", address, "--model", self.request.model, "--engine", config.engine]
        arguments += ["--threads", str(config.threads), "--spool", str(spool), *QUICK]
        arguments += ["--state", str(self._state()), *(["--deterministic"] if config.deterministic else [])]
        arguments += ["--config", str(self.request.directory.path / "config.toml")] if other else []
        await start(TASKSERVER, ["taskserver", *arguments, *(f"--reply={reply}" for reply in config.replies)])
        return address

    def _state(self) -> Path:
        """Where the task server commits. What an earlier run has left there belongs to nobody."""
        state = self.request.directory.path / "state"
        with blamed(state):
            shutil.rmtree(state, ignore_errors=True)
            state.mkdir()
        return state.resolve()

    async def _host(self, address: str, spool: Path) -> Exit:
        hello = Hello(PeerRole.HOST, PeerName(self.name), self.machine, os.getpid())
        client = Client(self.transport.connect(address), hello, self.clock, self._on_event)
        failure: Exception | None = None
        exit = Exit("failed", 1)
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.serve, name="client")
            for child in self.interrupt.children:
                tasks.start_soon(self._watch, child, client, name=f"watch {child.name}")
            try:
                await client.joined(JOIN, address)
                exit = await self._train(client, spool)
                await client.leave(exit.reason)
            except (CoordinatorLost, RunOver) as error:  # is it because a process of ours has died?
                dead = await first_dead(self.interrupt.children)
                failure = ProcessDied(dead.story()) if dead is not None else error
            except (ClientError, ConfigError, RunDirectoryError, BulkError) as error:
                failure = error
                await client.leave(f"{type(error).__name__}")
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return exit

    async def _watch(self, child: Child, client: Client) -> None:
        """What the end of a child means: a task server is started again, without the coordinator there is no run."""
        if child.name == TASKSERVER:
            children, note = self.interrupt.children, self.progress.note
            await keep_running(child, children, self.clock, note, client.abandon)
        else:
            client.abandon(await child.died())

    async def _train(self, client: Client, spool: Path) -> Exit:
        request, config = self.request, self.request.config
        run = run_id(request.directory.path)
        cast = roles(run, request.scenario, config)
        done = request.checkpoint.manifest.round if request.checkpoint else 0
        model = "" if not request.coordinator else request.model
        spec = run_spec(run, request.scenario, config, cast, model, done)
        spec = for_further_hosts(spec, request.scenario, config, cast)
        admitted = await client.submit(spec)
        check_targets(cast, admitted.model)
        template = ChatTemplate(Tokenizer.from_bundle(admitted.tokenizer))
        played = production(run, request.scenario, config, cast, template, admitted.model.context)
        agents = tuple(Agent(role, make_learner(role)) for role in cast)
        bulk = BulkClient(partial(self.transport.connect, limits=BULK_LIMITS), machine=self.machine)
        bundles = HostBundles(lambda: client.admitted or admitted, BundleStore(spool, machine=self.machine), bulk)
        training = Training(client, spec, config, played, agents, bundles, request.directory, self.progress, self.clock)
        training.model = admitted.model.digest
        training.checkpoint, training.rows = request.checkpoint, list(request.rows)
        self.interrupt.training = training
        if self.drained:
            training.stop(self.drained)
        self.facts = run_facts(request, cast, admitted.model.name)
        self.progress.started(self.facts)
        try:
            exit = await play_rounds(training)
        finally:
            client.end(run, "the host is done")
        return exit

    def _on_event(self, event: Event) -> None:
        match event:
            case Queued():
                self.progress.note(f"waiting in the queue: {event.reason}")
            case Missing():
                self.progress.missing(event.round, event.phase, event.edge, event.arrived, event.missing)
            case Draining():
                self.progress.note(f"the coordinator drains: {event.reason}")
                self.drained = event.reason
                if self.interrupt.training is not None:
                    self.interrupt.training.stop(event.reason)
            case CoordinatorLoad():
                if self.interrupt.training is not None:
                    self.interrupt.training.load = event

    def _finish(self, exit: Exit, seconds: float) -> None:
        """The pages and the last word. A full disk here must not hide why the run ended."""
        directory, training = self.request.directory, self.interrupt.training
        rows = training.rows if training is not None else []
        headline = self.request.scenario.headline
        result = RunResult(
            exit,
            findings.changes(rows, headline),
            sample_transcripts(training),
            tuple(_files(directory, bool(rows))),
            seconds,
            findings.warnings(rows, self.request.config.groups),
        )
        try:
            if rows and self.facts is not None:
                picture = self.draw(rows, headline)
                if picture is not None:
                    directory.write_bytes("curves.png", picture)
                page = summary(self.facts, rows, result, curves="curves.png" if picture is not None else "")
                directory.write_text("summary.md", page)
        except RunDirectoryError as error:
            self.progress.note(str(error))
        try:
            directory.finish(exit)
        except RunDirectoryError as error:
            self.progress.note(str(error))
        self.progress.finished(result)


def _failed(error: ClientError | ProcessDied) -> Exit:
    match error:
        case ProcessDied():
            return Exit("process died", 3, str(error))
        case CoordinatorLost():
            return Exit("coordinator lost", 3, str(error))
        case RunOver():
            return Exit("stopped", 3, str(error))
        case _:
            return Exit("refused", 1, str(error))


def run_id(directory: Path) -> RunId:
    """A name for the run that tells people which directory it belongs to, can begin the names of its bundles, and never comes again (what
    an earlier run has committed is not its own)."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", directory.resolve().name).strip(".-")[:60]
    return RunId(f"{plain or 'run'}-{os.getpid()}-{token_hex(3)}")


def make_learner(role: Role) -> Learner:
    """The learner of one agent, as its configuration says."""
    learning = role.learning
    options = LearnerOptions(
        denominator=learning.denominator,
        drop_zero=learning.entropy == 0 and learning.kl == 0,
        frozen=role.frozen,
        max_lag=learning.max_lag,
    )
    return Learner(role.name, make_algorithm(learning.algorithm, **learning.algorithm_options()), options)


def run_facts(request: RunRequest, cast: tuple[Role, ...], model: str) -> RunFacts:
    config = request.config
    agents = tuple(
        AgentFacts(role.name, role.seats, role.policy, "frozen" if role.frozen else role.learning.algorithm)
        for role in cast
    )
    return RunFacts(
        request.scenario.name,
        request.scenario.description,
        agents,
        model,
        config.rounds,
        config.groups * config.group_size,
        request.directory.path,
        config.seed,
        request.scenario.headline,
        request.command,
        config.groups,
    )


def sample_transcripts(training: Training | None) -> tuple[str, ...]:
    """Two episodes of the last round in words: one with the best, one with the worst scores."""
    if training is None or not training.samples:
        return ()
    ranked = sorted(training.samples, key=lambda each: (sum(score for _, score in each.scores), each.episode))
    chosen = [ranked[-1], ranked[0]] if len(ranked) > 1 else ranked
    return tuple(render(episode.recording) for episode in chosen)


def _files(directory: RunDirectory, written: bool) -> list[tuple[str, Path]]:
    """Where everything lies; `written`: the pages will be there, too."""
    names = (
        ("summary", "summary.md"),
        ("report", "report.html"),
        ("metrics", "metrics.jsonl"),
        ("adapters", "adapters"),
        ("recordings", "recordings"),
    )
    return [(what, directory.path / name) for what, name in names if written or (directory.path / name).exists()]
