"""A whole system on one virtual clock: the coordinator daemon, hosts with a run each, task servers with the scripted engine, and faults.

One seed is one history. While it lasts, the core and the witness look at every step; when its faults are over, every run must come to an
outcome within PATIENCE virtual seconds, and nothing of it may be left.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import anyio.lowlevel
import structlog
from sim_core import WatchedCore, looked_at_when_changed
from sim_engine import REPLIES, TOKENIZER, Mood, SimEngine
from sim_faults import BENIGN, FAULTS, Plan
from sim_host import SimPlay, make_play, simulated_disks
from sim_journal import JournalDisk, simulated_journal
from sim_loop import LoopClock, SimLoop, SimulationError
from sim_net import SimNetwork
from sim_store import Disks, SimBulk, SimStore
from sim_witness import ANY, Witness, read_once

from coordinator.app.arrays import Arrays
from coordinator.app.config import Barriers
from coordinator.app.daemon import Daemon
from coordinator.app.further import Further
from coordinator.app.journal import fold, open_journal, snapshot
from coordinator.app.rundir import Exit
from coordinator.core.coordinator import REJOIN
from tinker.protocol.values import PeerName, PoolKind, RunId
from tinker.runtime.codec import WireError, decode
from tinker.runtime.journal import JournalDamaged, JournalError, read_segment, segment_paths
from tinker.server.taskserver import Pool, TaskServer, TaskServerError

PATIENCE = 400.0  # virtual seconds after the last fault within which every run has an outcome
FOLDED = 4  # at the end of every fourth history the journal is folded, as it is after every restart
LEASE = 4.0
BUNDLE = TOKENIZER.bundle()
SHAPES = ("rfu", "rru", "rrfu", "rufr")


class Failure(AssertionError):
    """A history that went wrong: why, the command that plays it again, and its last events."""


@dataclass
class World:
    """`outcomes`: how each host's run ended. `live`: task servers that serve, by name."""

    seed: int
    loop: SimLoop
    plan: Plan
    witness: Witness = field(default_factory=Witness)
    mood: Mood = field(default_factory=Mood)
    core: WatchedCore | None = None
    daemon: Daemon | None = None
    coordinator: str = ""
    plays: dict[str, SimPlay] = field(default_factory=dict)
    outcomes: dict[str, Exit] = field(default_factory=dict)
    journal: JournalDisk = field(init=False)
    live: dict[str, TaskServer] = field(default_factory=dict)
    further: dict[str, Further] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    given: dict[str, object] = field(default_factory=dict)  # what every run is configured with, whatever the seed chose
    patience: float = PATIENCE
    apart: frozenset[tuple[str, str]] = frozenset()  # cuts that outlast the faults: they end by themselves
    did: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    _born: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"world {self.seed}")
        self.witness.accepted = frozenset(reply[0] for reply in REPLIES[:-1])
        self.net = SimNetwork(self.loop, self.seed, self.witness.sent, self.witness.arrived)
        self.disks = Disks(random.Random(f"disks {self.seed}"))
        self.journal = JournalDisk(random.Random(f"journal {self.seed}"))

    # --- processes ---

    def begin(self, process: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def guarded() -> None:
            try:
                await main()
            except Exception as error:
                self.crashes.append(f"{process} crashed: {''.join(traceback.format_exception(error))}")

        self.loop.begin(process, guarded(), process)

    def kill(self, process: str) -> None:
        """As SIGKILL does: it runs no further, whatever it was about to do."""
        self.note(f"{process} is killed")
        self.net.kill(process)
        self.loop.freeze(process)
        self.disks.gone.add(f"data machine of {process}")
        self.live.pop(process, None)
        self.further.pop(process, None)
        if process in self.plays:
            self.outcomes.setdefault(process, Exit("killed", 137))

    def clock(self) -> LoopClock:
        """A process's own: no two machines count from the same moment."""
        return LoopClock(self.loop, self.rng.uniform(0.0, 1e5))

    def start_coordinator(self) -> None:
        """A first one, or the one that comes after a crash: it folds the journal."""
        if "coordinator" in self.net.listeners:  # two crashes asked for one
            return
        self._born["coordinator"] += 1
        number = self._born["coordinator"]
        self.coordinator = "coordinator" if number == 1 else f"coordinator{number}"
        core = WatchedCore(PeerName("coordinator"), lease=LEASE)
        core.witness, core.answers = self.witness, {}
        clock = self.clock()
        self.journal.dead = False
        try:
            recorder = open_journal(cast(Any, self.journal.path), core, clock.now())
        except JournalDamaged as error:
            self.witness.broken.append(f"I8 the journal cannot be read any more: {error}")
            return
        except JournalError:  # its disk is full: whoever keeps it running tries again
            self.later(1.0, self.start_coordinator)
            return
        if self.coordinator in self.net.dead:  # it died at its first write
            return
        self.did["torn tail repaired"] += recorder.journal is not None and bool(recorder.journal.repaired)
        core.awake = True
        core.watch([])
        if number > 1:
            self.witness.restarted()
            self.note(f"a coordinator restarts with epoch {core.epoch}")
            for run in core.runs.values():
                self.did[f"coordinator restarted in {run.rounds.phase} {run.rounds.edge}"] += 1
        self.core = core
        listener = self.net.transport(self.coordinator).listen("coordinator")
        arrays = Arrays()
        arrays._tokenizers = self.journal.tokenizers
        daemon = Daemon(core, listener, clock, cpu=lambda: 0.0, recorder=recorder, arrays=arrays)
        self.daemon = daemon

        async def serve() -> None:
            """Until it is told to drain; then another one comes."""
            await daemon.serve()
            self.did["coordinator drained"] += 1
            self.note("the coordinator has drained")
            self.later(self.rng.uniform(0.1, 6.0), self.start_coordinator)

        self.begin(self.coordinator, serve)

    def kill_coordinator(self, *, machine: bool = False) -> None:
        """It comes again soon, after the machine failed without what had not reached its disk."""
        dead = self.coordinator
        self.kill(dead)
        if machine:
            self.journal.fail_machine()
        self.later(self.rng.uniform(0.1, 6.0), self.start_coordinator)

    def start_server(self, shape: str) -> str:
        number = self._born["server"]
        self._born["server"] += 1
        name = f"server{number}"
        kinds = {"r": PoolKind.ROLLOUT, "f": PoolKind.FORWARD, "u": PoolKind.UPDATE}
        capacity = self.rng.choice((2, 64))
        pools = tuple(
            Pool(kind, shape.count(letter), capacity if letter == "r" else 1)
            for letter, kind in kinds.items()
            if letter in shape
        )
        engine = SimEngine(name, self.mood, random.Random(f"engine {self.seed} {name}"), self.witness)
        machine = f"machine of {name}"
        bulk = SimBulk(self.disks, machine)
        connection = self.net.transport(name).connect("coordinator")
        store = SimStore(self.disks, machine, f"data {machine}")
        server = TaskServer(
            PeerName(name),
            engine,
            BUNDLE,
            connection,
            cast(Any, store),
            cast(Any, bulk),
            cast(Any, bulk),
            self.clock(),
            number,
            pools,
        )
        self.live[name] = server

        async def serve() -> None:
            try:
                async with engine:
                    await server.serve()
            except TaskServerError as error:
                self.note(f"{name} gives up: {error}")
                self.did["task server gave up"] += 1
            finally:
                self.live.pop(name, None)
            await server.leave("it ends")

        self.begin(name, serve)
        return name

    def start_host(self) -> str:
        number = self._born["host"]
        self._born["host"] += 1
        name = f"host{number}"
        play = make_play(number, self.rng, self.net.transport(name), self.clock(), self.disks, self.given)
        self.plays[name] = play

        async def run() -> None:
            exit = await play.run()
            self.note(f"{name} ends: {exit.reason}: {exit.detail[-200:]}")
            self.outcomes[name] = exit

        self.begin(name, run)
        return name

    def start_further(self, learner: str, end: str, after: float) -> None:
        """A further host of this host's run comes, and tries again if the run is not there yet. It `stays`, `leaves`, `dies`, or is
        away for a while and goes on then (`_further_apart`)."""
        play = self.plays.get(learner)
        if play is None or learner in self.outcomes:
            return
        number = self._born["further"]
        self._born["further"] += 1
        name = f"further{number}"
        rng = random.Random(f"further {self.seed} {number}")
        run, transport = RunId(play.request.directory.path.name), self.net.transport(name)
        shape = rng.choice((1, 2, 8)), name, rng.choice((0.5, 10.0))
        clock = LoopClock(self.loop, rng.uniform(0.0, 1e5))
        host = Further(run, play.request.scenario, "coordinator", *shape, clock, transport, f"machine of {name}")
        self.further[name] = host

        async def serve() -> None:
            exit = await host.serve()
            self.note(f"{name} ends: {exit.reason}: {exit.detail[-200:]}")
            self.did[f"further host ended: {exit.reason}"] += 1
            self.further.pop(name, None)
            if exit.reason == "refused":
                self.later(2.0, self.start_further, learner, end, after)

        self.begin(name, serve)
        if end == "leaves":
            self.later(after, host.leave)
        elif end == "dies":
            self.later(after, self._further_dies, name)
        elif end != "stays":
            self.later(0.0, self._further_apart, name, end)

    def _further_dies(self, name: str) -> None:
        if name in self.further:
            self.did["further host died"] += 1
            self.kill(name)

    def _further_apart(self, name: str, how: str) -> None:
        """Once it has something in hand it stands still (`sleeps`) or is not heard (`cut off`), until it has been given up and others play
        what it had; or, once it has delivered a group, it hears nothing (`deaf`) and says again what is settled by then."""
        if name not in self.further:
            return
        runs = self.core.runs.values() if self.core is not None else ()
        groups = [each for run in runs for each in run.dealing.groups.values() if each.host == name]
        ready = [each for each in groups if how != "deaf" or each.delivered.issuperset(each.episodes)]
        if not ready or self.loop.is_frozen(name):
            self.later(0.02, self._further_apart, name, how)
            return
        self.did[f"further host {how}"] += 1
        if how == "sleeps":
            self.loop.freeze(name)
        else:
            ends = (name, "coordinator") if how == "cut off" else ("coordinator", name)
            self.apart |= {ends}
            self.net.cut(*ends)
        self.later(3 * LEASE, self._further_together, name)

    def _further_together(self, name: str) -> None:
        for ends in ((name, "coordinator"), ("coordinator", name)):
            self.apart -= {ends}
            self.net.heal(*ends)
        if name not in self.net.dead:
            self.loop.thaw(name)

    def plan_further(self) -> None:
        """In one history of three; by a source of chance of its own, so that the others stay what they were."""
        rng = random.Random(f"further {self.seed}")
        for _ in range(rng.choice((0, 0, 1, 2))):
            learner, end = (
                f"host{rng.randrange(self.plan.hosts)}",
                rng.choice(("stays", "leaves", "dies", "sleeps", "cut off", "deaf")),
            )
            self.later(rng.uniform(1.0, 8.0), self.start_further, learner, end, rng.uniform(0.5, 10.0))

    # --- the life of a history ---

    async def live_through(self) -> None:
        rng = self.rng
        self.start_coordinator()
        for number in range(self.plan.servers):
            self.later(
                rng.uniform(0.0, 1.0),
                self.start_server,
                rng.choice(SHAPES) if number == 0 else rng.choice((*SHAPES, "r", "rr")),
            )
        for _ in range(self.plan.hosts):
            self.later(rng.uniform(0.0, 3.0), self.start_host)
        self.plan_further()
        await anyio.sleep(3.0 if not self.plan.faults else rng.uniform(0.0, 3.0))
        for fault in self.plan.faults:
            await self._watched(rng.uniform(0.0, 4.0))
            self.did[f"fault: {fault}"] += 1
            self.note(f"fault: {fault}")
            FAULTS[fault](self)
        await self._watched(rng.uniform(0.0, 6.0))
        self.end_faults()
        began = self.loop.time()
        while len(self.outcomes) < self.plan.hosts:
            await self._watched(1.0)
            if not any(_full(server) for server in self.live.values()):
                self.start_server("ru")  # an operator would: runs in the queue need one
            waited = self.loop.time() - began
            if waited > self.patience:
                missing = sorted(set(self.plays) - set(self.outcomes))
                raise SimulationError(f"{missing} wait for ever; waiting:\n{self.loop.waiting()}")
        await self._watched(3 * LEASE)
        restarted = self._born["coordinator"] > 1  # then a host whose farewell was lost is waited for: it may come back
        until = self.loop.time() + (REJOIN if restarted else 0.0)
        while self.core and (self.core.runs or self.core.queue) and self.loop.time() < until:
            await self._watched(2 * LEASE)
        self.check_end()

    async def _watched(self, seconds: float) -> None:
        """Let time pass; stop at the first thing that went wrong."""
        until = self.loop.time() + seconds
        while self.loop.time() < until:
            await anyio.sleep(min(0.5, until - self.loop.time()))
            self.check()

    def check(self) -> None:
        found = self.witness.broken + self.crashes + self.loop.faults
        if found:
            raise SimulationError(found[0])

    def end_faults(self) -> None:
        self.note("the faults are over")
        self.net.clear(self.apart)
        for name in ("generate", "stale", "load", "update", "forget"):
            setattr(self.mood, name, 0.0)
        self.disks.full.clear()
        self.journal.full = False
        self.journal.crash = None
        for process in [self.coordinator, *self.live, *self.plays, *self.further]:
            if process not in self.net.dead:
                self.loop.thaw(process)

    def check_end(self) -> None:
        """Every run has ended: nothing of it is left, and what the coordinator told makes sense as a whole."""
        self.witness.check_end()
        core = self.core
        assert core is not None
        if core.runs or core.queue or core.turns.tables or +core.turns.in_flight:
            left = [*core.runs, *core.queue, *core.turns.tables]
            self.witness.broken.append(f"I5 the coordinator still holds {left} {core.turns.in_flight}")
        if self.further:
            self.witness.broken.append(f"I5 further hosts wait for ever: {sorted(self.further)}")
        for play in self.plays.values():
            for name, kept in cast(Any, play.request.directory).recordings.items():
                if len({recording.episode for recording in kept}) < len(kept):
                    self.witness.broken.append(f"I4 an episode of {name} is recorded twice")
        bad = {name: exit for name, exit in self.outcomes.items() if exit.reason != "finished"}
        bad = {name: exit for name, exit in bad.items() if not self.may_stop(name, exit)}
        if bad and BENIGN.issuperset(self.plan.faults):
            self.witness.broken.append(f"nothing happened that may end a run, but: {bad}")
        if self.seed % FOLDED == 0:
            again = WatchedCore(PeerName("coordinator"), lease=LEASE)
            fold(again, read_segment(segment_paths(cast(Any, self.journal.path))[-1], last=True))
            if snapshot(again) != snapshot(core):
                self.witness.broken.append("I8 the journal leads to another state than the coordinator's")
        for name, exit in self.outcomes.items():
            self.did[f"run ended: {exit.reason}"] += 1
            if exit.reason == "crashed":
                self.crashes.append(f"{name} crashed: {exit.detail}")
        self.check()

    def may_stop(self, name: str, exit: Exit) -> bool:
        """Whether the rule of a barrier has stopped this run."""
        ruled = self.plays[name].request.config.barriers != Barriers()
        self.did["run stopped by the rule of a barrier"] += ruled and "did not open in" in exit.detail
        return ruled and "did not open in" in exit.detail

    def later(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Call it then, as the simulation."""
        self.loop.at(self.loop.time() + seconds, call, *arguments)

    def note(self, text: str) -> None:
        self.log.append(f"{self.loop.time():9.3f}  * {text}")
        self.net.digest.update(text.encode())

    def story(self, last: int = 60) -> str:
        """What happened last, frames and faults in the order of time."""
        lines = []
        for time, sender, receiver, data, what in list(self.net.story)[-last:]:
            try:
                text = repr(decode(data, ANY))
            except WireError as error:
                text = f"no message: {error}"
            lines.append(f"{time:9.3f}    {sender} -> {receiver} {what}: {text[:220]}")
        notes = [line for line in self.log if not lines or line[:9] >= lines[0][:9]] or self.log[-10:]
        return "\n".join(sorted([*lines, *notes], key=lambda line: line[:9]))


def _full(server: TaskServer) -> bool:
    return {pool.kind for pool in server.pools} >= {PoolKind.ROLLOUT, PoolKind.UPDATE}


@dataclass(frozen=True, slots=True)
class Ran:
    """One history that went well. `did`: what happened in it, by name. `virtual`: its seconds."""

    seed: int
    digest: str
    did: Counter[str]
    virtual: float


def play(seed: int, plan: Plan | None = None, prepare: Callable[[World], None] = lambda world: None) -> Ran:
    """Play one history; Failure if anything in it may not be. `prepare` may change the world before it begins."""
    structlog.configure(processors=[_dropped], cache_logger_on_first_use=False)
    loop = SimLoop(seed)
    world = World(seed, loop, plan or Plan.of(seed))
    prepare(world)
    collecting = gc.isenabled()
    gc.disable()
    failure = ""
    try:
        with (
            simulated_disks(world.disks),
            looked_at_when_changed(),
            read_once(world.witness),
            simulated_journal(world.journal),
        ):
            try:
                loop.run_until_complete(loop.begin("", world.live_through(), "the history"))
            except SimulationError as error:
                failure = str(error)
                story = world.story()
            digest = world.net.digest.hexdigest()
            virtual = loop.time()
            _unwind(world)
    finally:
        loop.close()
        if collecting:
            gc.enable()
    if failure:
        raise Failure(
            f"seed {seed}: {failure}\n\n{world.plan}\n{story}\n\nplay it again: make sim SEEDS={seed}..{seed}"
        )
    return Ran(
        seed,
        digest,
        world.did + world.witness.did + world.net.did + world.disks.did + world.journal.did + _counts(world),
        virtual,
    )


def _counts(world: World) -> Counter[str]:
    assert world.core is not None
    return Counter({f"core: {name}": count for name, count in world.core.counts.items()})


def _unwind(world: World) -> None:
    """End everything that still runs, so that no task outlives its loop."""
    loop = world.loop
    for process in ["coordinator", *world.plays, *(life.process for life in loop.tasks.values())]:
        world.net.dead.add(process)
    for _ in range(50):
        for process in sorted(world.net.dead):
            loop.thaw(process)
        left = [task for task in sorted(loop.tasks, key=lambda task: loop.tasks[task].birth) if not task.done()]
        if not left:
            return
        for task in left:
            task.cancel()
        loop.run_until_complete(loop.begin("", _moment(), "unwinding"))


async def _moment() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


def _dropped(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent
