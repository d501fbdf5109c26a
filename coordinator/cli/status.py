"""What `opentinker status` asks a coordinator, and how it says who waits for whom."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import overload

import anyio
from pydantic import ValidationError

from coordinator.app.access import Keys
from coordinator.app.bounded import SNAPSHOT
from coordinator.app.snapshot import HostStatus, PeerStatus, RunStatus, Snapshot
from tinker.protocol import ToWatcher
from tinker.protocol.to_any import Draining, Refused
from tinker.protocol.to_daemon import Drain, Status, Watch
from tinker.runtime.codec import WireError, decode, encode
from tinker.runtime.transport import TransportError, ZmqTransport, unpinned

PATIENCE = 5.0  # seconds a coordinator on this machine may take to answer
STALE = 0.5  # of a lease: a member silent for longer is worth a word


class NoAnswer(Exception):
    """There is no coordinator at this address; the message says what to do."""


def page(where: str) -> str:
    """The address of the status page: `where` is a URL, HOST:PORT, or a file with the first line that a coordinator printed."""
    url = where
    if "://" not in where and Path(where).is_file():
        try:
            url = json.loads(Path(where).read_text(encoding="utf-8").splitlines()[0])["http"]
        except (ValueError, KeyError, IndexError, TypeError, OSError):
            raise NoAnswer(
                f"{where} names no HTTP address; it should hold the first line that `opentinker coordinator --http 127.0.0.1:0` prints"
            ) from None
    elif "://" not in where:
        url = f"http://{where}"
    if not url.startswith("http://"):
        raise NoAnswer(f"{url} is not an http:// address; a coordinator says its own when it starts with --http")
    return f"{url.rstrip('/').removesuffix('/status.json')}/status.json"


def fetch(url: str) -> Snapshot:
    """Ask once. NoAnswer if there is no answer, or one that we do not understand."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=PATIENCE) as answer:
            return SNAPSHOT.validate_json(answer.read())
    except ValidationError:
        raise NoAnswer(f"what answers at {url} is no coordinator of this version") from None
    except (OSError, ValueError) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoAnswer(
            f"no coordinator answers at {url} ({why}); start one with `opentinker coordinator --http 127.0.0.1:7655`, "
            "or name its address with --http"
        ) from None


def watched(address: str, keys: Keys) -> Snapshot:
    """Ask the coordinator itself, with one message. NoAnswer if it does not answer, or not to us."""
    try:
        return SNAPSHOT.validate_json(asked(address, keys, Watch()).snapshot)
    except ValidationError:
        raise NoAnswer(f"what answers at {unpinned(address)[0]} is no coordinator of this version") from None


@overload
def asked(address: str, keys: Keys, question: Watch) -> Status: ...
@overload
def asked(address: str, keys: Keys, question: Drain) -> Draining: ...
def asked(address: str, keys: Keys, question: Watch | Drain) -> Status | Draining:
    """The answer. NoAnswer says why there is none."""
    where, what = unpinned(address)[0], type(question).__name__
    try:
        answer = decode(anyio.run(_exchanged, address, keys, encode(question)), ToWatcher)
    except TimeoutError:
        raise NoAnswer(
            f"no coordinator answers at {where} within {PATIENCE:.0f} s; start one with `opentinker coordinator`, "
            "or name its address with --coordinator (one that has keys answers only who has one, too: --key)"
        ) from None
    except (TransportError, WireError) as error:
        raise NoAnswer(f"the coordinator at {where} was asked in vain: {error}") from None
    if isinstance(answer, Refused):
        raise NoAnswer(f"the coordinator at {where} refused {what}: {answer.reason}")
    if isinstance(answer, Status) != isinstance(question, Watch):
        raise NoAnswer(f"the coordinator at {where} answered {what} with {type(answer).__name__}")
    return answer  # type: ignore[no-any-return]


async def _exchanged(address: str, keys: Keys, frame: bytes) -> bytes:
    connection = ZmqTransport(keys.security()).connect(address)
    try:
        connection.send(frame)
        with anyio.fail_after(PATIENCE):
            return await connection.receive()
    finally:
        await connection.aclose(0)


def described(now: Snapshot) -> Iterator[str]:
    """The lines that `opentinker status` prints."""
    yield f"coordinator {now.coordinator} (epoch {now.epoch}), up {ago(now.uptime)}"
    if now.left_out:
        yield f"too much for one message: {now.left_out} entries of long lists are left out"
    if now.draining:
        yield f"draining: {now.draining}"
    yield from ("", *(line for peer in now.peers for line in _peer(peer, now.lease)))
    if not now.peers:
        yield "no members"
    if not now.runs and not now.queue:
        yield from ("", "no runs")
    for run in now.runs:
        yield from ("", *_run(run))
    for stopped in now.stopped:
        yield from ("", f"run {stopped.run} ({stopped.scenario}) of {stopped.host} was stopped: {stopped.reason}")
    for queued in now.queue:
        yield from ("", f"run {queued.run} ({queued.scenario}) of {queued.host}: number {queued.place} in the queue")
    refused = {name: number for name, number in now.counts.items() if name.startswith("refused ")}
    if refused:
        yield from ("", ", ".join(f"{name}: {number}" for name, number in refused.items()))


def _peer(peer: PeerStatus, lease: float) -> Iterator[str]:
    silent = f", not heard for {ago(peer.lease_age)}" if peer.lease_age > STALE * lease else ""
    if peer.unreachable is not None:
        silent = f", unreachable for {ago(peer.unreachable)}: its work waits, after {2 * lease:.0f} s of silence it is given up"
    yield f"{peer.role} {peer.name} (process {peer.pid} on {peer.machine[:12]}){silent}"
    if peer.model:
        kinds = ", ".join(f"{each.kind} {each.in_flight}/{each.capacity}" for each in peer.workers)
        yield f"  model {peer.model}; busy: {kinds or 'no workers left'}"


def _run(run: RunStatus) -> Iterator[str]:
    where = "finished" if run.state == "finished" else f"at the {run.edge} of {run.phase}"
    yield f"run {run.run} ({run.scenario}) of {run.host}: round {run.round} of {run.rounds}, {where}"
    if run.versions:
        yield "  versions: " + ", ".join(f"{policy}@{version}" for policy, version in run.versions.items())
    if run.episodes_open:
        yield f"  {run.episodes_open} episodes open, {run.turns_open} turns open"
    if run.updating:
        yield "  updating: " + ", ".join(f"{agent} (round {round})" for agent, round in run.updating.items())
    if len(run.hosts) > 1:
        hosts = (f"{each.name} {each.episodes}/{each.capacity} ({_state(each)})" for each in run.hosts)
        yield f"  hosts, with episodes in hand: {', '.join(hosts)}"
    if run.groups_waiting:
        yield f"  {run.groups_waiting} groups of episodes wait for a host with room"
    for arrived in run.arrived:
        yield f"  {arrived.member} has waited for {ago(arrived.waited)}"
    for missing in run.missing:
        yield f"  waiting for {missing.member} since {ago(missing.waited)}: {missing.why}"


def _state(host: HostStatus) -> str:
    return host.state + (f", {host.delivered} delivered" if host.delivered else "")


def ago(seconds: float) -> str:
    """A duration in the two units that matter."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, hours = whole // 60, whole // 3600
    return f"{minutes} min {whole % 60} s" if hours == 0 else f"{hours} h {minutes % 60} min"
