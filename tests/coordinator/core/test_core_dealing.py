"""Who plays what: groups of episodes dealt to the hosts of a run, dealt again when a host is lost, delivered and settled."""

from __future__ import annotations

from dataclasses import dataclass, field

from core_values import ROLLOUT, RUN, START, agent, answer, arrival, blob, host_hello, request, run_spec, server_hello

from coordinator.core.coordinator import Coordinator
from coordinator.core.dealing import Dealing, Hand
from tinker.protocol import to_coordinator as said
from tinker.protocol.operations import Attach, OptimStep, Published
from tinker.protocol.to_any import Refused
from tinker.protocol.to_host import (
    Delivered,
    Enlisted,
    Opened,
    Play,
    Queued,
    RunStopped,
    Settled,
    TurnClosed,
    TurnRefused,
)
from tinker.protocol.to_taskserver import Cancel, Discard, Generate
from tinker.protocol.values import (
    AdamSpec,
    AgentName,
    Dealt,
    Ended,
    EpisodeId,
    LoraSpec,
    OpId,
    PeerName,
    PolicyName,
    PolicyVersion,
    RunId,
    Term,
    TurnId,
    WorkerName,
)

LEARNER, ANN, BOB, SERVER = (PeerName(name) for name in ("host", "ann", "bob", "server"))
TERMS = (Term("version", "1"), Term("parameters", "{}"))


def episode(index: int) -> EpisodeId:
    return EpisodeId(1, ROLLOUT, index)


def dealing(*hosts: tuple[PeerName, int], groups: int, size: int = 2) -> tuple[Dealing, list[tuple[PeerName, int]]]:
    """A phase that begins with these hosts (the first is the learner host), and who is dealt which group."""
    made = Dealing(RUN, hosts[0][0], {hosts[0][0]: Hand(hosts[0][1])})
    for name, capacity in hosts[1:]:
        made.join(name, capacity)
    sends = made.begin([tuple(episode(g * size + k) for k in range(size)) for g in range(groups)], ())
    assert made.violations() == []
    return made, plays(sends)


def plays(sends: list[tuple[PeerName, object]]) -> list[tuple[PeerName, int]]:
    return [(name, message.group) for name, message in sends if isinstance(message, Play)]


def test_groups_go_to_the_least_loaded_host_by_share_of_its_capacity() -> None:
    _, dealt = dealing((LEARNER, 4), (ANN, 8), groups=6)
    assert dealt == [(LEARNER, 0), (ANN, 1), (ANN, 2), (LEARNER, 3), (ANN, 4), (ANN, 5)]


def test_what_finds_no_room_waits_until_an_episode_is_accounted_for() -> None:
    made, dealt = dealing((LEARNER, 2), groups=2)
    assert dealt == [(LEARNER, 0)]
    assert plays(made.account(episode(1))) == [(LEARNER, 1)]
    assert made.account(episode(1)) == []


def test_a_host_that_joins_in_the_middle_of_a_phase_is_dealt_what_waits() -> None:
    made, _ = dealing((LEARNER, 2), groups=3)
    assert plays(made.join(ANN, 4)) == [(ANN, 1), (ANN, 2)]


def test_a_host_that_retires_keeps_what_it_has_and_is_dealt_nothing_more() -> None:
    made, dealt = dealing((LEARNER, 2), (ANN, 2), groups=3)
    assert dealt == [(LEARNER, 0), (ANN, 1)]
    assert made.retire(ANN) == [(ANN, Settled(RUN, ()))]
    assert made.account(episode(2)) == []
    assert made.holder(episode(3)) == (ANN, 0)
    assert plays(made.account(episode(0))) == [(LEARNER, 2)]


def test_delivered_episodes_make_room_before_they_are_accounted_for() -> None:
    made, _ = dealing((LEARNER, 2), (ANN, 2), groups=3)
    sends = made.played(ANN, Dealt(1, ROLLOUT, 1), (episode(2), episode(3)), blob("x"))
    assert sends is not None
    assert isinstance(sends[0][1], Delivered)
    assert plays(sends) == [(ANN, 2)]
    assert made.violations() == []


def test_of_a_lost_host_only_what_is_not_accounted_for_is_played_again() -> None:
    made, _ = dealing((LEARNER, 8), (ANN, 8), groups=2)
    made.account(episode(2))
    again, sends = made.lose(ANN)
    assert again == (episode(3),)
    assert [(name, m.episodes, m.attempt) for name, m in sends if isinstance(m, Play)] == [(LEARNER, (episode(3),), 1)]
    assert made.played(ANN, Dealt(1, ROLLOUT, 1), (episode(3),), blob("x")) is None
    assert made.violations() == []


def test_a_host_is_told_again_what_it_lacks_and_what_is_not_its_own() -> None:
    made, _ = dealing((LEARNER, 2), (ANN, 2), groups=2)
    sends = made.in_hand(ANN, (Dealt(1, ROLLOUT, 0), Dealt(0, ROLLOUT, 4)))
    assert plays(sends) == [(ANN, 1)]
    assert sends[-1] == (ANN, Settled(RUN, (Dealt(0, ROLLOUT, 4), Dealt(1, ROLLOUT, 0))))
    assert made.in_hand(ANN, (Dealt(1, ROLLOUT, 1),)) == []


def test_a_host_that_cannot_be_reached_keeps_what_it_has_and_is_dealt_nothing_meanwhile() -> None:
    made, _ = dealing((LEARNER, 2), (ANN, 4), groups=5)
    made.reach(ANN, False)
    assert made.account(episode(2)) == []
    assert made.holder(episode(3)) == (ANN, 0)
    assert plays(made.reach(ANN, True)) == [(ANN, 3)]
    assert made.reach(ANN, True) == []
    assert made.violations() == []


def test_a_phase_that_is_dropped_is_settled_with_everybody_and_forgotten() -> None:
    made, _ = dealing((LEARNER, 2), (ANN, 2), groups=3)
    assert made.drop() == [(ANN, Settled(RUN, (Dealt(1, ROLLOUT, 1),)))]
    assert made.violations() == []
    assert made.holder(episode(4)) == ("", 0)


# --- through the coordinator ---


@dataclass
class Desk:
    """A coordinator with a run of agent a in the rollout of round 1: groups of one episode, a learner host that plays one at once."""

    core: Coordinator = field(default_factory=lambda: Coordinator(PeerName("coordinator")))
    groups: int = 2

    def __post_init__(self) -> None:
        for hello in (server_hello("server", "ru"), host_hello(), host_hello("ann"), host_hello("bob")):
            self.core.join(hello, 0.0)
        spec = run_spec(agent("a"), groups=self.groups, group_size=1, capacity=1, terms=TERMS, setup=b"setup", rounds=2)
        self.says(LEARNER, said.Submit(spec))
        self.operate("attach", Attach(LoraSpec()))
        published = Published(PolicyVersion(PolicyName("policy of a"), 0), blob("a0"))
        self.says(SERVER, said.WorkerDone(RUN, OpId("attach"), WorkerName("server/u1"), published))
        self.says(SERVER, said.Loaded(RUN, WorkerName("server/r0"), published.version, "a0"))

    def says(self, peer: PeerName, message: object) -> list[tuple[PeerName, object]]:
        sends = self.core.step(peer, message, 1.0)  # type: ignore[arg-type]
        assert self.core.violations() == []
        return sends

    def operate(self, op: str, operation: object) -> list[tuple[PeerName, object]]:
        message = said.Operate(RUN, OpId(op), AgentName("a"), PolicyName("policy of a"), operation)  # type: ignore[arg-type]
        return self.says(LEARNER, message)

    def begin(self) -> list[tuple[PeerName, object]]:
        return self.says(LEARNER, arrival("a", 1, ROLLOUT, START))

    def lose(self, peer: PeerName) -> list[tuple[PeerName, object]]:
        sends = self.core.lose(peer, "it was killed", 2.0)
        assert self.core.violations() == []
        return sends


def enlist(capacity: int = 1, terms: tuple[Term, ...] = TERMS, scenario: str = "test") -> said.Enlist:
    return said.Enlist(RUN, scenario, capacity, terms)


def opening(index: int, number: int = 0, attempt: int = 0) -> said.OpenTurn:
    turn = TurnId(RUN, episode(index), number, attempt)
    return said.OpenTurn(turn, (request("x", PolicyVersion(PolicyName("policy of a"), 0)),), 20.0)


def test_a_further_host_is_told_what_it_needs_and_plays_what_it_is_dealt() -> None:
    desk = Desk()
    ((_, enlisted),) = desk.says(ANN, enlist())
    assert isinstance(enlisted, Enlisted)
    assert (enlisted.learner, enlisted.setup, enlisted.data) == (LEARNER, b"setup", "data of server")
    dealt = [(name, m) for name, m in desk.begin() if isinstance(m, Play)]
    assert [(name, m.episodes) for name, m in dealt] == [(LEARNER, (episode(0),)), (ANN, (episode(1),))]
    assert [m.versions for _, m in dealt] == [(), (PolicyVersion(PolicyName("policy of a"), 0),)]
    ((server, asked),) = desk.says(ANN, opening(1))
    assert isinstance(asked, Generate)
    ((told, closed),) = desk.says(server, answer(asked))
    assert isinstance(closed, TurnClosed)
    assert told == ANN


def test_an_episode_that_another_host_plays_may_not_be_played() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    for peer, index in ((ANN, 0), (LEARNER, 1), (BOB, 1)):
        ((told, refused),) = desk.says(peer, opening(index))
        assert told == peer
        assert isinstance(refused, TurnRefused)
    assert desk.core.counts["refused OpenTurn"] == 3


def test_an_episode_of_a_group_that_waits_may_not_be_played() -> None:
    """Its host was lost and nobody has room: an old request for a turn of the attempt before opened a table again."""
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    desk.says(ANN, opening(1))
    desk.lose(ANN)  # its group waits: the learner host has no room
    for attempt in (0, 1):
        ((told, refused),) = desk.says(LEARNER, opening(1, attempt=attempt))
        assert told == LEARNER
        assert isinstance(refused, TurnRefused)
        assert refused.fenced
    assert not desk.core.turns.tables


def test_what_a_further_host_has_played_goes_to_the_learner_host_which_accounts_for_it() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    played = said.Played(RUN, Dealt(1, ROLLOUT, 1), (episode(1),), blob("x"))
    delivered = (LEARNER, Delivered(RUN, ANN, played.deal, played.episodes, played.bundle))
    assert desk.says(ANN, played) == [delivered]
    assert desk.says(ANN, played) == [delivered]  # said again until the learner host has accounted for it
    assert desk.says(LEARNER, said.EpisodeEnded(RUN, episode(1), Ended.FINISHED)) == [
        (ANN, Settled(RUN, (played.deal,)))
    ]
    ((_, settled),) = desk.says(ANN, played)
    assert settled == Settled(RUN, (played.deal,))
    assert desk.core.counts["late episodes"] == 1


def test_a_lost_hosts_turn_and_late_answers_and_results_are_fenced() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.says(BOB, enlist(capacity=2))
    desk.begin()
    ((_, first),) = desk.says(ANN, opening(1))
    assert isinstance(first, Generate)
    sends = desk.lose(ANN)
    assert any(isinstance(m, Cancel) for _, m in sends)
    ((again_to, again),) = [(name, m) for name, m in sends if isinstance(m, Play)]
    assert isinstance(again, Play)
    assert (again_to, again.episodes, again.attempt) == (BOB, (episode(1),), 1)
    assert desk.core.counts["episodes dealt again"] == 1

    ((_, refused),) = desk.says(BOB, opening(1))  # the attempt before
    assert isinstance(refused, TurnRefused)
    ((_, second),) = desk.says(BOB, opening(1, attempt=1))
    assert isinstance(second, Generate)
    assert (
        desk.says(SERVER, answer(first)) == []
    )  # of the lost host's turn, although worker, seat and number are the same
    assert desk.core.counts["refused answers"] == 1
    ((told, closed),) = desk.says(SERVER, answer(second))
    assert isinstance(closed, TurnClosed)
    assert (told, closed.turn.attempt) == (BOB, 1)

    desk.core.join(host_hello("ann"), 3.0)  # it comes back and delivers what is not its own any more
    desk.says(ANN, enlist())
    late = said.Played(RUN, Dealt(1, ROLLOUT, 1), (episode(1),), blob("x"))
    assert desk.says(ANN, late) == [(ANN, Settled(RUN, (late.deal,)))]
    assert desk.core.counts["late episodes"] == 1


def test_a_host_of_another_scenario_version_or_parameters_is_refused_by_name() -> None:
    desk = Desk()
    other_version = (Term("version", "2"), TERMS[1])
    other_parameters = (TERMS[0], Term("parameters", '{"most": 9}'))
    for message, says in (
        (enlist(scenario="nim"), "run 'run' plays 'test', ann has 'nim'"),
        (enlist(terms=other_version), "version is 2, the run's is 1"),
        (enlist(terms=other_parameters), 'parameters is {"most": 9}, the run\'s is {}'),
        (enlist(terms=()), "version is missing, the run's is 1"),
        (enlist(capacity=0), "at least 1"),
        (said.Enlist(RunId("other"), "test", 1), "there is no run 'other' here; there are: run"),
    ):
        ((_, refused),) = desk.says(ANN, message)
        assert isinstance(refused, Refused)
        assert says in refused.reason
    assert desk.core.runs[RUN].dealing.further() == ()


def test_a_further_host_may_not_learn_end_or_account() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    for message in (
        arrival("a", 1, ROLLOUT, START),
        said.EpisodeEnded(RUN, episode(1), Ended.FINISHED),
        said.Operate(RUN, OpId("x"), AgentName("a"), PolicyName("policy of a"), OptimStep(AdamSpec(1.0))),
        said.EndRun(RUN, "mine"),
    ):
        ((_, refused),) = desk.says(ANN, message)
        assert isinstance(refused, Refused)
    assert RUN in desk.core.runs


def test_further_hosts_wait_with_a_run_in_the_queue() -> None:
    core = Coordinator(PeerName("coordinator"))
    for name in ("host", "ann"):
        core.join(host_hello(name), 0.0)
    core.step(LEARNER, said.Submit(run_spec()), 0.0)
    ((_, queued),) = core.step(ANN, enlist(terms=()), 0.0)
    assert isinstance(queued, Queued)


def test_further_hosts_hear_how_the_run_ended_also_when_they_missed_it() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    sends = desk.says(LEARNER, said.EndRun(RUN, "done"))
    (over,) = [m for name, m in sends if name == ANN]
    assert isinstance(over, RunStopped)
    assert over.finished
    assert desk.says(ANN, said.InHand(RUN, ())) == [(ANN, over)]


def test_with_the_learner_host_the_run_is_over_for_everybody() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    (over,) = [m for name, m in desk.lose(LEARNER) if name == ANN]
    assert isinstance(over, RunStopped)
    assert "its learner host host is gone (it was killed)" in over.reason
    assert not over.finished


def test_played_episodes_are_removed_from_the_data_plane_when_their_phase_is_over() -> None:
    desk = Desk()
    desk.says(ANN, enlist())
    desk.begin()
    desk.says(ANN, said.Played(RUN, Dealt(1, ROLLOUT, 1), (episode(1),), blob("x")))
    assert [m for _, m in desk.begin() if isinstance(m, Discard)] == []  # told again, while the phase goes on
    for index in (0, 1):
        desk.says(LEARNER, said.EpisodeEnded(RUN, episode(index), Ended.FINISHED))
    for phase, edge in (("update", "start"), ("update", "end")):
        desk.says(LEARNER, arrival("a", 1, phase, edge, samples=0))  # type: ignore[arg-type]
    sends = desk.says(LEARNER, arrival("a", 2, ROLLOUT, START))
    assert any(isinstance(m, Opened) for _, m in sends)
    assert (SERVER, Discard(RUN, 1, ROLLOUT)) in sends
