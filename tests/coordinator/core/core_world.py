"""A small world around the coordinator's core: honest hosts and task servers, a network that reorders and duplicates, and faults.

One seed is one history. While it is played, the world checks after every step what the core may never break; when the faults are over it
plays on until every run has ended, and fails if something waits for ever. `python core_world.py SEED...` prints one digest per history.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from core_further import FurtherHost
from core_hosts import Host, Slowly
from core_lagging import LaggingHost
from core_servers import Server
from core_values import (
    agent,
    arrival,
    arrivals,
    blob,
    canonical,
    host_hello,
    request,
    run_spec,
    server_hello,
    turn,
    version,
)

from coordinator.core.coordinator import Coordinator, MemberRefused
from coordinator.core.deadlines import members, rule_of
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import OptimStep
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import BarrierRule, Straggler
from tinker.protocol.to_host import Opened, TurnRefused
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import AdamSpec, Dealt, Edge, PeerName, Phase, RunId

FURTHER = ("further joins",) * 4 + (
    "further retires",
    "further says good-bye",
    "further comes back",
    "further dies",
    "further dies",
)
SHAPES = ("ru", "rruf", "rrru", "rufu")


@dataclass
class World:
    """`to_core` and `to_peer`: messages under way, per peer. `chaos`: faults may happen."""

    seed: int
    core: Coordinator = field(default_factory=lambda: Coordinator(PeerName("coordinator")))
    now: float = 0.0
    hosts: dict[str, Host] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    further: dict[str, FurtherHost] = field(default_factory=dict)
    to_core: dict[str, list[object]] = field(default_factory=dict)
    to_peer: dict[str, list[object]] = field(default_factory=dict)
    sent: list[tuple[str, object]] = field(default_factory=list)
    frozen: dict[str, float] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    withheld: list[tuple[float, str, object]] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    chaos: bool = True
    steps: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    states_too: bool = False
    digesting: bool = True
    lagging: bool = False  # runs have agents that may lag

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    # --- the life of a history ---

    def play(self, steps: int = 250) -> None:
        for number in range(self.rng.randint(1, 2)):
            self.add_host(f"host{number}")
        for number in range(self.rng.randint(1, 3)):
            self.add_server(f"server{number}", full=number == 0)
        for number in range(self.rng.choice((0, 0, 1, 2))):
            self.add_further(f"further{number}")
        for _ in range(steps):
            self.one()
        self.chaos = False
        self.frozen.clear()
        self.back()
        idle, progress = 0, 0
        while not all(host.over for host in self.hosts.values()):
            if self.deliver():
                continue
            before, progress = progress, sum(host.progress for host in self.hosts.values())
            idle = idle + 1 if progress == before else 0
            assert idle < 40, (
                f"seed {self.seed}: waits for ever: {[h.story() for h in self.hosts.values() if not h.over]}"
            )
            if idle == 20:
                self.add_server(f"rescue{self.steps}", full=True)  # runs in the queue need one
            self.pass_time(5.0)
        while self.deliver():
            pass
        for each in self.further.values():
            self.to_core[each.name] += each.again()
        while self.deliver():
            pass
        assert all(each.over for each in self.further.values()), "a further host outlives its run"
        for host in self.hosts.values():
            host.check_end()
        assert not self.core.runs and not self.core.queue and not self.core.turns.tables, "something outlives its run"
        assert not +self.core.turns.in_flight
        if self.digesting:
            self.digest.update(canonical(self.core).encode())

    def one(self) -> None:
        """One random thing happens."""
        chance = self.rng.random()
        if chance < 0.04 and any(host.spec.barriers for host in self.hosts.values()):
            self.pass_time(0.2)
        elif chance < 0.86:
            self.deliver()
        elif chance < 0.90:
            self.pass_time(self.rng.choice((0.1, 1.0, 6.0)))
        elif chance < 0.97:
            self.forge()
        else:
            self.break_something()

    # --- the network ---

    def deliver(self) -> bool:
        """Move one message; False if none is under way."""
        choices = [(box, name) for box in (self.to_core, self.to_peer) for name in box if box[name]]
        choices = [(box, name) for box, name in choices if name not in self.frozen]
        if not choices:
            return False
        box, name = self.rng.choice(choices)
        self.now += 0.001
        if box is self.to_core:
            late = self.chaos and self.rng.random() < 0.2  # overtaken by whatever else is under way
            message = box[name].pop(self.rng.randrange(len(box[name])) if late else 0)
            if self.chaos and self.rng.random() < 0.05:
                self.sent.append((name, message))
            self.say(name, message)
            if self.chaos and self.rng.random() < 0.05:
                self.did["duplicate at once"] += 1
                self.say(name, message)
        else:
            message = box[name].pop(0)
            peer = self.hosts.get(name) or self.servers.get(name) or self.further.get(name)
            if peer is not None:
                for answer in peer.hear(message, self):
                    if isinstance(answer, Slowly):
                        self.did["straggler"] += 1
                        self.withheld.append((self.now + self.rng.choice((0.3, 2.0, 12.0)), name, answer.message))
                    else:
                        self.to_core[name].append(answer)
        return True

    def say(self, name: str, message: object) -> None:
        """The core takes one step."""
        before = sum(self.core.counts.values())
        at = {run.spec.run: run.rounds.at for run in self.core.runs.values() if not run.rounds.finished}
        sends = self.core.step(PeerName(name), message, self.now)  # type: ignore[arg-type]
        fresh = [m for _, m in sends if isinstance(m, Opened) and (m.round, m.phase, m.edge) == at.get(m.run)]
        assert not any(each.dropped for each in fresh), "a message leaves nobody out, only time does"
        if any(isinstance(each, Refused | TurnRefused) for _, each in sends):
            assert sum(self.core.counts.values()) > before, f"seed {self.seed}: {message} was refused but not counted"
        self.after(sends)

    def after(self, sends: list[tuple[PeerName, object]]) -> None:
        self.steps += 1
        for name, message in sends:
            if self.digesting:
                self.digest.update(f"{name} {message!r}\n".encode())
            if isinstance(message, Generate):
                self.servers[name].check_asked(message, self)
            if name in self.to_peer:
                self.to_peer[name].append(message)
        if self.states_too and self.steps % 7 == 0:
            self.digest.update(canonical(self.core).encode())
        broken = self.core.violations()
        assert broken == [], f"seed {self.seed}, step {self.steps}: {broken}"
        for name in [name for name in self.to_core if PeerName(name) not in self.core.roster.peers]:
            self.gone(name)

    def gone(self, name: str) -> None:
        """The core gave this peer up; it never comes back under this name."""
        del self.to_core[name], self.to_peer[name]
        self.frozen.pop(name, None)
        self.cut.discard(name)
        self.servers.pop(name, None)
        self.further.pop(name, None)
        if name in self.hosts:
            self.hosts[name].lost = True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [(name, message) for until, name, message in self.withheld if until <= self.now]
        self.withheld = [each for each in self.withheld if each[0] > self.now]
        for name, message in due:
            self.to_core.get(name, []).append(message)
        self.frozen = {name: until for name, until in self.frozen.items() if until > self.now}
        self.back()
        for name in list(self.to_core):
            if name not in self.frozen:
                self.say(name, said.Heartbeat())
        for each in self.further.values():
            self.to_core[each.name] += each.again()
        self.after(self.core.tick(self.now))
        for run in self.core.runs.values():
            rule = rule_of(run.spec, run.rounds.phase, run.rounds.edge)
            late = rule is not None and not run.rounds.finished and self.now - run.since >= rule.deadline
            assert not late or (rule is not None and rule.straggler == Straggler.WAIT), (
                "a gathering outlives its deadline"
            )

    def part(self, name: str) -> None:
        """Its connection is closed for a while. What is on its way to a server is lost; a host is told again what it asked for."""
        if name in self.cut:
            return
        self.did["cut"] += 1
        self.cut.add(name)
        self.frozen[name] = self.now + self.rng.choice((0.5, 3.0, 25.0, 100.0))
        if name in self.servers:
            self.to_peer[name].clear()
        self.after(self.core.part(PeerName(name), self.now))
        self.after(self.core.step(PeerName(name), said.Heartbeat(), self.now))  # too early: it is a stranger

    def back(self) -> None:
        """Who was cut off and is not any more says Hello again."""
        for name in sorted(self.cut - set(self.frozen)):
            self.cut.remove(name)
            self.did["back"] += 1
            server = self.servers.get(name)
            known = self.core.roster.peers[PeerName(name)].hello
            hello = replace(known, incarnation=known.incarnation + 1)
            if server is not None and not hello.workers:  # there is nothing left to join with
                self.after(self.core.lose(PeerName(name), "it has no workers", self.now))
                continue
            if server is not None:
                hello = replace(hello, holding=server.holding())
                self.to_peer[name].clear()
            self.after(self.core.join(hello, self.now))

    # --- who is there ---

    def add_host(self, name: str) -> None:
        count = self.rng.randint(1, 4)
        every = [self.rng.choice((1, 1, 1, 2, 0)) for _ in range(count)]
        names = [f"{name}-{letter}" for letter in "abcd"[:count]]
        shuffled = self.rng.sample(names, count)
        order = self.rng.choice(
            ((), tuple((n,) for n in shuffled), (tuple(shuffled[:2]),), (tuple(shuffled[1:]), (shuffled[0],)))
        )
        spec = run_spec(
            *(agent(n, e) for n, e in zip(names, every, strict=True)),
            run=f"run of {name}",
            rounds=self.rng.randint(1, 3),
            groups=self.rng.randint(1, 3),
            group_size=self.rng.randint(1, 3),
            capacity=self.rng.choice((1, 3, 256)),
            evaluations=self.rng.randint(0, 2),
            evaluate_every=self.rng.randint(0, 2),
            update_order=tuple(group for group in order if group),
            model=self.rng.choice(("", "m1")),
        )
        if self.lagging:
            spec = self.lagging_spec(spec)
        if self.rng.random() < 0.5:
            spec = replace(spec, barriers=self.rules(spec))
        patience, limit = self.rng.choice((0.0, 20.0, 300.0)), self.rng.choice((0.0, 0.0, 7.0))
        spec = replace(spec, worker_deadline=patience, operation_deadline=limit)
        self.hosts[name] = LaggingHost(spec, self.rng) if self.lagging else Host(spec, self.rng)
        self.to_core[name], self.to_peer[name] = [said.Submit(spec)], []
        self.after(self.core.join(host_hello(name), self.now))

    def lagging_spec(self, spec: said.RunSpec) -> said.RunSpec:
        """The same run, longer, with agents that may lag, each as it likes."""
        lags = [self.rng.choice((0, 1, 1, 2, 3)) for _ in spec.agents]
        lags[self.rng.randrange(len(lags))] = self.rng.randint(1, 3)
        agents = tuple(replace(each, max_lag=lag) for each, lag in zip(spec.agents, lags, strict=True))
        return replace(spec, agents=agents, rounds=self.rng.randint(2, 6))

    def rules(self, spec: said.RunSpec) -> tuple[BarrierRule, ...]:
        """A rule for about every second barrier."""
        found = []
        dropping = self.rng.random() < 0.85
        for phase, edge in product(Phase, Edge):
            most = members(spec, phase, edge)
            straggler = Straggler.DROP if dropping else self.rng.choice(list(Straggler))
            deadline, quorum = (
                self.rng.choice((0.3, 0.3, 2.0)),
                self.rng.randint(1, 1 if dropping else min(2, most or 1)),
            )
            if self.lagging and phase == Phase.UPDATE:
                continue
            if most and self.rng.random() < 0.5:
                found.append(BarrierRule(phase, edge, deadline, straggler, quorum))
        return tuple(found)

    def add_further(self, name: str) -> None:
        """A further host of some run; it may come before the run is admitted."""
        learner = self.rng.choice(list(self.hosts.values()))
        if name not in self.to_core and not learner.over:
            self.further[name] = FurtherHost(name, learner.spec, self.rng)
            self.to_core[name], self.to_peer[name] = [self.further[name].enlist()], []
            self.after(self.core.join(host_hello(name), self.now))

    def add_server(self, name: str, full: bool) -> None:
        kinds = self.rng.choice(SHAPES) if full else self.rng.choice((*SHAPES, "r", "rr", "f"))
        model = "m1" if full or self.rng.random() < 0.8 else "m2"
        hello = server_hello(name, kinds, model)
        self.servers[name] = Server(hello, self.rng)
        self.to_core[name], self.to_peer[name] = [], []
        self.after(self.core.join(hello, self.now))

    # --- what goes wrong ---

    def break_something(self) -> None:
        what = self.rng.choice(("worker", "worker", "server", "freeze", "join", "join", "host", "cut", "cut", *FURTHER))
        servers = [name for name in self.servers if name in self.to_core]
        self.did[f"fault: {what}"] += 1
        if what == "join":
            self.add_server(f"more{self.steps}", full=self.rng.random() < 0.5)
        elif what == "further joins":
            self.add_further(f"further{self.steps}")
        elif what.startswith("further") and self.further:
            self.further_leaves(what, self.rng.choice(list(self.further.values())))
        elif what == "host" and self.rng.random() < 0.15:
            name = self.rng.choice(list(self.hosts))
            self.after(self.core.lose(PeerName(name), "its connection closed", self.now))
        elif what == "server" and servers and self.rng.random() < 0.4:
            self.after(self.core.lose(PeerName(self.rng.choice(servers)), "its connection closed", self.now))
        elif what == "cut" and self.to_core:
            self.part(self.rng.choice(list(self.to_core)))
        elif what == "freeze" and self.to_core:
            self.frozen[self.rng.choice(list(self.to_core))] = self.now + self.rng.choice((3.0, 25.0, 100.0))
        elif what == "worker" and servers:
            server = self.servers[self.rng.choice(servers)]
            keep_updater = self.rng.random() < 0.8
            workers = [
                w.name
                for w in server.hello.workers
                if w.name in server.alive and not (keep_updater and w.kind == "update")
            ]
            if workers:
                worker = self.rng.choice(workers)
                server.alive.remove(worker)
                self.to_core[server.hello.name].append(said.WorkerLost(worker, "it died"))

    def further_leaves(self, what: str, host: FurtherHost) -> None:
        name = host.name
        if what == "further retires" and host.enlisted:
            host.retired = True
            self.to_core[name].append(said.Retire(host.spec.run))
        elif what == "further says good-bye":
            self.to_core[name].append(said.Bye("enough"))
        elif what == "further comes back":  # as another process, while old messages of the first are under way
            late = [message for message in self.to_core[name] if not isinstance(message, said.Enlist)]
            self.after(self.core.lose(PeerName(name), "its connection closed", self.now))
            self.sent = [(who, each) for who, each in self.sent if who != name or not isinstance(each, said.Enlist)]
            self.add_further(name)
            self.to_core.get(name, []).extend(late)
        elif what == "further dies":
            self.after(self.core.lose(PeerName(name), "its connection closed", self.now))

    def forge(self) -> None:
        """Somebody says something wrong, or something old again: it is refused or changes nothing."""
        if self.sent and self.rng.random() < 0.5:
            name, message = self.rng.choice(self.sent)
            if name in self.to_core:
                self.did["old message again"] += 1
                self.say(name, message)
            return
        host = self.rng.choice(list(self.hosts.values()))
        owner, spec = host.name, host.spec
        who = self.rng.choice(spec.agents)
        number = host.version[who.name]
        at = (self.rng.randint(0, 4), self.rng.choice(list(Phase)), self.rng.choice(list(Edge)))
        played = self.rng.choice([turn(0, request("x", version("nobody", 1))), *host.turns.values()])
        server = self.rng.choice([*self.servers.values(), None])
        worker = server.hello.workers[0].name if server else "nobody"
        wrong: list[object] = [
            arrival(who.name, *at, number + 1 + self.rng.randrange(3), run=spec.run),
            arrival("nobody", *at, run=spec.run),
            arrival(who.name, 9, at[1], at[2], number, run=spec.run),
            arrival(who.name, *at, number, run="no run"),
            arrivals([each.name for each in spec.agents], *at, number + 4, run=spec.run),
            arrivals([who.name, "nobody"], *at, number, run=spec.run),
            arrivals([who.name, who.name], *at, number, run=spec.run),
            replace(arrivals([who.name], *at, number, run=spec.run), digests=("other weights",)),
            replace(arrivals([who.name], *at, number, run=spec.run), digests=("a", "b")),
            replace(arrivals([who.name], *at, number, run=spec.run), samples=(1, 2)),
            replace(played, requests=(replace(played.requests[0], policy=version("nobody", 0)), *played.requests[1:])),
            replace(played, requests=played.requests + played.requests, turn=replace(played.turn, number=99)),
            replace(played, turn=replace(played.turn, run=RunId("no run"))),
            replace(
                played, turn=replace(played.turn, number=99), requests=(request("x", version(who.name, number + 1)),)
            ),
            said.Operate(spec.run, f"forged{self.steps}", who.name, "policy of nobody", OptimStep(AdamSpec(1.0))),  # type: ignore[arg-type]
            said.Operate(RunId("no run"), f"forged{self.steps}", who.name, who.policy, OptimStep(AdamSpec(1.0))),  # type: ignore[arg-type]
            said.EndRun(RunId("no run"), "forged"),
            said.Enlist(RunId("no run"), spec.scenario, 1),
            said.Enlist(spec.run, "another scenario", 1),
            said.Enlist(spec.run, spec.scenario, 0),
            said.Played(spec.run, Dealt(*at[:2], self.rng.randrange(3), 1), (played.turn.episode,), blob("forged")),
            said.InHand(spec.run, (Dealt(*at[:2], self.rng.randrange(3), 1),)),
            *([said.Submit(replace(spec, rounds=spec.rounds + 1)), said.Submit(spec)] if self.known(spec.run) else []),
            host_hello(owner),
            said.Loaded(spec.run, worker, version("nobody", 3), "x"),  # type: ignore[arg-type]
            said.WorkerDone(spec.run, "no op", worker, None),  # type: ignore[arg-type]
            said.WorkerFailed(spec.run, "no op", worker, "forged"),  # type: ignore[arg-type]
            said.GenerateFailed(
                replace(played.turn, number=played.turn.number + 1), played.requests[0].seat, worker, "forged"
            ),  # type: ignore[arg-type]
        ]
        if isinstance(host, LaggingHost):
            wrong += host.wrong_arrivals() * 4
        message = self.rng.choice(wrong)
        self.did["forged"] += 1
        self.say(self.rng.choice([owner, "stranger", *self.servers, *self.hosts]), message)
        for taken in [name for name, peer in self.core.roster.peers.items() if peer.closed is None][:1]:
            with suppress(MemberRefused):
                self.core.join(server_hello(taken), self.now)
                raise AssertionError(f"the name {taken} was given twice")

    def known(self, run: RunId) -> bool:
        return run in self.core.runs or run in self.core.queue


if __name__ == "__main__":
    for seed in sys.argv[1:]:
        world = World(int(seed), states_too=True, lagging=int(seed) % 2 == 1)
        world.play()
        print(world.digest.hexdigest())
