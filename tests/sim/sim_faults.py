"""What goes wrong in a history, and when: chosen by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim_net import Weather

from tinker.protocol.to_any import Welcome
from tinker.protocol.to_host import RunStopped
from tinker.protocol.values import PeerName
from tinker.runtime.codec import encode

if TYPE_CHECKING:
    from sim_world import World

REPLACED = 8.0  # seconds until another coordinator has taken the place of one that died, and members have found it


@dataclass(frozen=True, slots=True)
class Plan:
    """How large the system is and which faults happen, in order. One history in ten has none."""

    hosts: int
    servers: int
    faults: tuple[str, ...]

    @staticmethod
    def of(seed: int) -> Plan:
        rng = random.Random(f"plan {seed}")
        hosts = rng.choice((1, 1, 1, 2, 2, 3))
        servers = rng.choice((1, 2, 2, 3))
        if rng.random() < 0.1:
            return Plan(hosts, servers, ())
        kinds = rng.sample(sorted(FAULTS), rng.randint(1, 4))
        return Plan(hosts, servers, tuple(rng.choice(kinds) for _ in range(rng.randint(1, 5))))


def slow_network(world: World) -> None:
    world.net.weather.latency = (0.0, world.rng.choice((0.1, 0.6)))
    world.net.weather.spike = world.rng.choice((0.0, 0.05))


def lossy(world: World) -> None:
    world.net.weather.loss = world.rng.choice((0.02, 0.1, 0.3))
    world.later(world.rng.uniform(1.0, 6.0), setattr, world.net.weather, "loss", 0.0)


def doubling(world: World) -> None:
    world.net.weather.duplicate = world.rng.choice((0.1, 0.5))


def overtaking(world: World) -> None:
    """Order is lost within connections too, as when a frame is lost and sent again."""
    world.net.weather.overtake = world.rng.choice((0.05, 0.3))
    world.net.weather.latency = (0.0, 0.2)


def drop_connection(world: World) -> None:
    """As `disconnect`, and its listener hears nothing of it."""
    link = _link(world, _somebody(world))
    if link is not None:
        world.net.disconnect(link, told=False)


def cut(world: World) -> None:
    """One direction between the coordinator and a peer stands still for a while."""
    peer = _somebody(world)
    ends = world.rng.sample(("coordinator", peer), 2)
    world.net.cut(*ends)
    world.later(world.rng.choice((0.5, 3.0, 12.0)), world.net.heal, *ends)


def disconnect(world: World) -> None:
    """A connection breaks and is made again; its listener hears of it."""
    link = _link(world, _somebody(world))
    if link is not None:
        world.net.disconnect(link, told=True)


def kill_server(world: World) -> None:
    """A task server dies; another one comes."""
    if world.live:
        world.kill(world.rng.choice(sorted(world.live)))
        world.later(world.rng.uniform(0.1, 5.0), world.start_server, "rfu")


def join_server(world: World) -> None:
    world.start_server(world.rng.choice(("r", "rru")))


def kill_host(world: World) -> None:
    running = [name for name in world.plays if name not in world.outcomes]
    if running and world.rng.random() < 0.5:
        world.kill(world.rng.choice(running))


def freeze(world: World) -> None:
    """A process stands still (SIGSTOP, a long garbage collection) and goes on later."""
    peer = world.rng.choice((world.coordinator, _somebody(world)))
    if world.loop.is_frozen(peer) or peer in world.net.dead:
        return
    world.loop.freeze(peer)

    def thaw() -> None:
        if peer not in world.net.dead:
            world.loop.thaw(peer)

    world.later(world.rng.choice((0.3, 3.0, 7.0, 20.0)), thaw)


def jump(world: World) -> None:
    """The machine was suspended: a late tick for everybody."""
    world.loop.jump(world.rng.choice((1.0, 30.0, 3600.0)))


def bad_answers(world: World) -> None:
    world.mood.generate = world.rng.choice((0.1, 0.5))
    world.later(world.rng.uniform(0.5, 5.0), setattr, world.mood, "generate", 0.0)


def stale_answers(world: World) -> None:
    """Engines answer with a version that nobody asked for."""
    world.mood.stale = world.rng.choice((0.1, 0.5))
    world.later(world.rng.uniform(0.5, 5.0), setattr, world.mood, "stale", 0.0)


def bad_loads(world: World) -> None:
    world.mood.load = world.rng.choice((0.1, 0.4))
    world.later(world.rng.uniform(0.5, 5.0), setattr, world.mood, "load", 0.0)


def bad_updates(world: World) -> None:
    world.mood.update = world.rng.choice((0.2, 0.6))
    world.later(world.rng.uniform(0.5, 5.0), setattr, world.mood, "update", 0.0)


def bad_workers(world: World) -> None:
    """Rollout workers fail outright: they are started again, and given up when that happens too often."""
    world.mood.forget = world.rng.choice((0.2, 0.9))
    world.later(world.rng.uniform(0.5, 5.0), setattr, world.mood, "forget", 0.0)


def slow_engines(world: World) -> None:
    world.mood.latency = (0.0, world.rng.choice((2.0, 8.0)))
    world.later(world.rng.uniform(0.5, 8.0), setattr, world.mood, "latency", (0.001, 0.3))


def full_disk(world: World) -> None:
    machine = f"machine of {world.rng.choice([*world.plays, *world.live] or ['host0'])}"
    world.disks.full.add(machine)
    world.later(world.rng.uniform(0.5, 6.0), world.disks.full.discard, machine)


def kill_coordinator(world: World) -> None:
    """It dies between two steps; its journal is whole."""
    if world.coordinator not in world.net.dead:
        world.kill_coordinator()


def kill_while_writing(world: World) -> None:
    """It dies at its next write: before, in the middle of or after its bytes, and before anything leaves."""
    world.journal.written = world.rng.choice((0.0, world.rng.random(), 1.0))
    world.journal.crash = world.kill_coordinator


def kill_machine(world: World) -> None:
    """The coordinator's machine fails: what was not synced is gone."""
    if world.coordinator not in world.net.dead:
        world.kill_coordinator(machine=True)


def full_journal(world: World) -> None:
    world.journal.full = True
    world.later(world.rng.uniform(0.5, 6.0), setattr, world.journal, "full", False)


def drain_coordinator(world: World) -> None:
    """SIGTERM: it ends its runs, leaves, and is started again."""
    if world.daemon is not None and world.coordinator not in world.net.dead:
        world.daemon.stop()


def old_coordinator(world: World) -> None:
    """One of an earlier epoch wakes up beside the one that has replaced it, and ends every run that it remembers. Where none has been
    replaced yet, the present one is: it dies, another one takes its place, and then it wakes up."""
    if any(known > 1 for known in world.witness.welcomed.values()):
        _old_one_speaks(world)
        return
    kill_coordinator(world)
    world.later(REPLACED, _old_one_speaks, world)


def _old_one_speaks(world: World) -> None:
    runs = world.core.runs if world.core is not None else ()
    for link in list(world.net.links.values()):
        known = world.witness.welcomed.get(link.process, 0)
        if known > 1:
            world.did["old coordinator spoke"] += 1
            link.down.put(encode(Welcome(PeerName("coordinator"), known - 1, 4.0)))
            for run in runs if link.process in world.plays else ():
                link.down.put(encode(RunStopped(run, "an old coordinator says so")))


def drain_server(world: World) -> None:
    """SIGTERM: it finishes what it has begun and leaves; another one comes."""
    if world.live:
        name = world.rng.choice(sorted(world.live))
        world.live[name].drain()
        world.did["task server drained"] += 1
        world.later(world.rng.uniform(0.1, 5.0), world.start_server, "rfu")


def calm(world: World) -> None:
    world.net.weather = Weather()


FAULTS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        slow_network,
        lossy,
        doubling,
        overtaking,
        drop_connection,
        cut,
        disconnect,
        kill_server,
        join_server,
        kill_host,
        freeze,
        jump,
        bad_answers,
        stale_answers,
        bad_loads,
        bad_updates,
        bad_workers,
        slow_engines,
        full_disk,
        kill_coordinator,
        kill_while_writing,
        kill_machine,
        full_journal,
        drain_coordinator,
        drain_server,
        old_coordinator,
        calm,
    )
}


BENIGN = frozenset(  # no run ends by these
    {
        "slow_network",
        "lossy",
        "doubling",
        "drop_connection",
        "join_server",
        "jump",
        "slow_engines",
        "bad_answers",
        "stale_answers",
        "kill_coordinator",
        "kill_while_writing",
        "kill_machine",
        "full_journal",
        "old_coordinator",
        "calm",
    }
)


def _somebody(world: World) -> str:
    """A host or a task server that lives."""
    peers = [name for name in [*world.plays, *world.live, *world.further] if name not in world.net.dead]
    return str(world.rng.choice(peers)) if peers else "nobody"


def _link(world: World, process: str) -> Any:
    return next((link for link in world.net.links.values() if link.process == process), None)
