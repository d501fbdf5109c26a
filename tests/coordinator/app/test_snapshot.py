"""The snapshot says who is waited for, since when, and why; and taking it changes nothing."""

from __future__ import annotations

import copy

from coordinator.app.snapshot import MissingStatus, RunStatus, snapshot
from coordinator.cli.status import ago, described
from coordinator.core.coordinator import Coordinator
from tinker.protocol.operations import Attach, ForwardBackward, Publish, Published
from tinker.protocol.to_coordinator import (
    AgentSpec,
    Arrive,
    Enlist,
    EpisodeEnded,
    Hello,
    Loaded,
    OpenTurn,
    Operate,
    RunSpec,
    SeatRequest,
    Submit,
    WorkerDone,
    WorkerOffer,
)
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Edge,
    Ended,
    EpisodeId,
    LoraSpec,
    LossSpec,
    ModelCard,
    OpId,
    PeerName,
    Phase,
    PolicyName,
    PolicyVersion,
    PoolKind,
    Role,
    RunId,
    Sampling,
    SeatName,
    TurnId,
    WorkerName,
    pack_ids,
)

RUN, HOST, SERVER = RunId("run"), PeerName("host"), PeerName("server")
ROLLOUT, UPDATE = WorkerName("server/rollout"), WorkerName("server/update")
CARD = ModelCard("demo", "digest", "tokenizer", 100, 64, (0,))
OFFERS = (WorkerOffer(ROLLOUT, PoolKind.ROLLOUT, "scripted", 8), WorkerOffer(UPDATE, PoolKind.UPDATE, "scripted", 1))
BLOB = BlobRef("adapter", "digest", 1, "here", "/nowhere", "")


def policy(agent: str) -> PolicyName:
    return PolicyName(f"run/{agent}")


def admitted(max_lag: int = 0) -> Coordinator:
    """At 10 s a run of two agents, updating in turn (if they may lag: together), has been admitted."""
    core = Coordinator(PeerName("coordinator"))
    core.join(Hello(Role.TASKSERVER, SERVER, "there", 2, OFFERS, CARD, "data", b""), 10.0)
    core.join(Hello(Role.HOST, HOST, "here", 1), 10.0)
    agents = tuple(AgentSpec(AgentName(name), policy(name), 1, max_lag) for name in ("ann", "bob"))
    order = () if max_lag else ((AgentName("ann"),), (AgentName("bob"),))
    core.step(HOST, Submit(RunSpec(RUN, "guess", agents, 3, 1, 2, 0, 0, update_order=order)), 10.0)
    return core


def attach(core: Coordinator, agent: str, *, load: bool = True) -> None:
    op, version = OpId(f"attach {agent}"), PolicyVersion(policy(agent), 0)
    core.step(HOST, Operate(RUN, op, AgentName(agent), policy(agent), Attach(LoraSpec())), 11.0)
    core.step(SERVER, WorkerDone(RUN, op, UPDATE, Published(version, BLOB)), 11.0)
    if load:
        core.step(SERVER, Loaded(RUN, ROLLOUT, version, "digest"), 11.0)


def arrive(
    core: Coordinator, phase: Phase, edge: Edge, *agents: str, now: float = 12.0, samples: int = 1, round: int = 1
) -> None:
    for agent in agents:
        core.step(HOST, Arrive(RUN, round, phase, edge, AgentName(agent), 0, samples), now)


def rolling_out() -> Coordinator:
    core = admitted()
    attach(core, "ann")
    attach(core, "bob")
    arrive(core, Phase.ROLLOUT, Edge.START, "ann", "bob")
    return core


def updating() -> Coordinator:
    """Since 14 s."""
    core = rolling_out()
    for index in (0, 1):
        core.step(HOST, EpisodeEnded(RUN, EpisodeId(1, Phase.ROLLOUT, index), Ended.FINISHED), 13.0)
    arrive(core, Phase.UPDATE, Edge.START, "ann", "bob", now=14.0)
    return core


def run_at(core: Coordinator, now: float) -> RunStatus:
    before = copy.deepcopy(core)
    [run] = snapshot(core, now).runs
    assert core == before
    return run


def test_an_agent_that_has_not_arrived_is_its_hosts_affair() -> None:
    core = admitted()
    attach(core, "ann")
    arrive(core, Phase.ROLLOUT, Edge.START, "ann")
    run = run_at(core, 20.0)
    assert (run.state, run.round, run.phase, run.edge) == ("rollout", 1, "rollout", "start")
    assert [(each.member, each.waited) for each in run.arrived] == [("ann", 8.0)]
    assert run.missing == (MissingStatus("bob", 10.0, "it has not arrived; its host host (heard 8 s ago)"),)


def test_an_agent_whose_version_is_loading_names_the_worker() -> None:
    core = admitted()
    attach(core, "ann", load=False)
    arrive(core, Phase.ROLLOUT, Edge.START, "ann")
    assert run_at(core, 20.0).missing[0].why == "run/ann@0 is loading at server/rollout"
    core.step(HOST, Arrive(RUN, 1, Phase.ROLLOUT, Edge.START, AgentName("bob"), 0), 12.0)
    assert run_at(core, 20.0).missing[1].why == "run/bob@0 is not published yet"


def test_an_agent_whose_operation_runs_names_it_and_its_worker() -> None:
    core = updating()
    gradient = ForwardBackward(BLOB, LossSpec("policy_gradient"))
    core.step(HOST, Operate(RUN, OpId("op1"), AgentName("ann"), policy("ann"), gradient), 15.0)
    run = run_at(core, 20.0)
    assert run.missing == (
        MissingStatus("ann", 6.0, "ForwardBackward is running at server/update"),
        MissingStatus("bob", 6.0, "its turn to update comes after ann"),
    )


def test_an_agent_that_may_update_but_does_nothing_is_told_from_the_others() -> None:
    run = run_at(updating(), 20.0)
    assert run.missing[0].why == "it may update; its host host (heard 6 s ago) has asked for nothing yet"


def test_where_updates_overlap_rollouts_it_says_how_far_each_agent_is() -> None:
    core = admitted(max_lag=1)
    attach(core, "ann")
    attach(core, "bob")
    for round in (1, 2):
        arrive(core, Phase.ROLLOUT, Edge.START, "ann", "bob", round=round)
        for index in range(2):
            core.step(HOST, EpisodeEnded(RUN, EpisodeId(round, Phase.ROLLOUT, index), Ended.FINISHED), 13.0)
    core.step(HOST, Arrive(RUN, 1, Phase.UPDATE, Edge.START, AgentName("ann"), 0, 1), 14.0)
    gradient = ForwardBackward(BLOB, LossSpec("policy_gradient"))
    core.step(HOST, Operate(RUN, OpId("op1"), AgentName("ann"), policy("ann"), gradient), 15.0)
    run = run_at(core, 20.0)
    assert run.updating == {"ann": 1}
    assert [each.why for each in run.missing] == [
        "ForwardBackward is running at server/update for its update of round 1",
        "its update of round 1 has not begun",
    ]
    assert "  updating: ann (round 1)" in "\n".join(described(snapshot(core, 20.0)))


def test_lag_is_what_is_played_against_the_newest() -> None:
    core = admitted(max_lag=1)
    attach(core, "ann")
    attach(core, "bob")
    arrive(core, Phase.ROLLOUT, Edge.START, "ann", "bob")
    for index in range(2):
        core.step(HOST, EpisodeEnded(RUN, EpisodeId(1, Phase.ROLLOUT, index), Ended.FINISHED), 13.0)
    arrive(core, Phase.ROLLOUT, Edge.START, "ann", "bob", round=2)
    assert run_at(core, 20.0).lags == {"run/ann": 0, "run/bob": 0}
    core.step(HOST, Arrive(RUN, 1, Phase.UPDATE, Edge.START, AgentName("ann"), 0, 1), 14.0)
    core.step(HOST, Operate(RUN, OpId("op1"), AgentName("ann"), policy("ann"), Publish(1)), 15.0)
    core.step(SERVER, WorkerDone(RUN, OpId("op1"), UPDATE, Published(PolicyVersion(policy("ann"), 1), BLOB)), 15.0)
    assert run_at(core, 20.0).lags == {"run/ann": 1, "run/bob": 0}


def test_episodes_name_the_workers_that_have_their_requests() -> None:
    core = rolling_out()
    assert run_at(core, 20.0).missing[0].why == "no turn is open: its host host (heard 8 s ago)"
    request = SeatRequest(SeatName("ann"), PolicyVersion(policy("ann"), 0), pack_ids([1]), Sampling(4))
    core.step(HOST, OpenTurn(TurnId(RUN, EpisodeId(1, Phase.ROLLOUT, 0), 0), (request,), 60.0), 15.0)
    now = snapshot(core, 20.0)
    [run] = now.runs
    assert run.missing == (MissingStatus("2 episodes", 8.0, "1 requests are at server/rollout"),)
    assert (run.episodes_open, run.turns_open, run.requests_waiting) == (2, 1, 0)
    assert [(each.name, each.in_flight) for each in now.peers[0].workers] == [(ROLLOUT, 1), (UPDATE, 0)]


def test_a_snapshot_has_members_versions_and_counts() -> None:
    core = rolling_out()
    core.drain("the coordinator is stopping")
    now = snapshot(core, 20.0, began=5.0)
    assert (now.uptime, now.draining) == (15.0, "the coordinator is stopping")
    assert [(peer.name, peer.role, peer.lease_age, peer.model) for peer in now.peers] == [
        ("server", "taskserver", 9.0, "demo"),
        ("host", "host", 8.0, ""),
    ]
    assert now.runs[0].versions == {"run/ann": 0, "run/bob": 0}
    assert now.counts == dict(core.counts)


def test_what_is_printed_says_who_waits_for_whom_and_why() -> None:
    core = updating()
    arrive(core, Phase.UPDATE, Edge.END, "ann", now=16.0)
    core.join(Hello(Role.HOST, PeerName("other"), "here", 3), 16.0)
    core.drain("the coordinator is stopping")
    text = "\n".join(described(snapshot(core, 140.0, began=10.0)))
    for line in (
        "coordinator coordinator (epoch 1), up 2 min 10 s",
        "draining: the coordinator is stopping",
        "taskserver server (process 2 on there), unreachable for 1 min 54 s: its work waits, after 30 s of silence it is given up",
        "  model demo; busy: rollout 0/8, update 0/1",
        "run run (guess) of host: round 1 of 3, at the end of update",
        "  ann has waited for 2 min 4 s",
        "  waiting for bob since 2 min 6 s: it may update; its host host (unreachable for 109 s) has asked for nothing yet",
    ):
        assert line in text.splitlines(), text


def test_a_coordinator_that_nobody_has_joined_says_so() -> None:
    lines = list(described(snapshot(Coordinator(PeerName("coordinator")), 3.0)))
    assert lines == ["coordinator coordinator (epoch 1), up 3.0 s", "", "no members", "", "no runs"]


def test_durations_are_readable() -> None:
    assert [ago(seconds) for seconds in (0.25, 59.9, 61, 7260)] == ["0.2 s", "59.9 s", "1 min 1 s", "2 h 1 min"]


def test_the_hosts_of_a_run_are_named_with_what_they_have_in_hand() -> None:
    core = admitted()
    core.join(Hello(Role.HOST, PeerName("more"), "there", 7), 10.0)
    core.step(PeerName("more"), Enlist(RUN, "guess", 4), 10.0)
    for agent in ("ann", "bob"):
        attach(core, agent)
    core.runs[RUN].dealing.retire(PeerName("more"))
    arrive(core, Phase.ROLLOUT, Edge.START, "ann", "bob")
    now = snapshot(core, 12.0)
    assert [(each.name, each.state, each.episodes) for each in now.runs[0].hosts] == [
        ("host", "learner", 2),
        ("more", "retired", 0),
    ]
    assert "  hosts, with episodes in hand: host 2/256 (learner), more 0/4 (retired)" in list(described(now))
    core.part(PeerName("more"), 12.0)
    assert snapshot(core, 12.0).runs[0].hosts[1].state == "away"


def test_runs_that_were_stopped_are_named_with_the_reason() -> None:
    core = rolling_out()
    core.lose(HOST, "its process 1 has ended", 13.0)
    now = snapshot(core, 14.0)
    (stopped,) = now.stopped
    assert (stopped.run, stopped.scenario, stopped.host) == (RUN, "guess", HOST)
    (line,) = [line for line in described(now) if "was stopped" in line]
    assert line.startswith(
        "run run (guess) of host was stopped: its learner host host is gone (its process 1 has ended)"
    )
