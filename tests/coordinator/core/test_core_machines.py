"""The small machines, one table each: barrier, update order, versions, routing, roster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_values import agent, blob, host_hello, server_hello, version

from coordinator.core import barrier, order, roster, versions
from coordinator.core.roster import MemberRefused, Roster
from coordinator.core.routing import choose
from coordinator.core.versions import Versions, WrongWeights
from tinker.protocol.values import BASE, PolicyName, WorkerName

W1, W2, W3 = WorkerName("w1"), WorkerName("w2"), WorkerName("w3")
AB = (agent("a"), agent("b"))
A = frozenset("a")


class TestBarrier:
    def test_it_opens_with_the_last_member_and_not_before(self) -> None:
        gate = barrier.gather(("a", "b", "c"))
        for name, opened in (("b", False), ("a", False), ("c", True)):
            gate = barrier.arrive(gate, (name,), 1.0)
            assert gate.opened is opened and barrier.violations(gate) == []

    def test_a_second_arrival_changes_nothing(self) -> None:
        gate = barrier.arrive(barrier.gather(("a", "b")), ("a",), 1.0)
        assert barrier.arrive(gate, ("a",), 2.0) is gate
        assert gate.missing == ("b",)

    def test_a_stranger_is_refused(self) -> None:
        with pytest.raises(KeyError, match="x"):
            barrier.arrive(barrier.gather(("a",)), ("a", "x"), 0.0)

    def test_without_members_it_is_open_at_birth(self) -> None:
        assert barrier.gather(()).opened

    def test_several_arrive_in_one_step_those_that_are_here_already_included(self) -> None:
        gate = barrier.arrive(barrier.gather(("a", "b", "c")), ("b",), 2.0)
        gate = barrier.arrive(gate, ("c", "b", "c", "a"), 5.0)
        assert gate.arrived == (("b", 2.0), ("c", 5.0), ("a", 5.0)) and gate.opened
        assert barrier.violations(gate) == []

    @pytest.mark.parametrize(
        ("state", "broken"),
        [
            (barrier.Barrier(("a",), (("x", 0.0),), awaited=A), ["B1"]),
            (barrier.Barrier(("a",), opened=True, awaited=A), ["B2"]),
            (barrier.Barrier(("a",), (("a", 0.0),)), ["B3"]),
            (barrier.Barrier(("a", "b"), (("a", 0.0),), awaited=frozenset("ab")), ["B4"]),
        ],
    )
    def test_its_violations_are_found(self, state: barrier.Barrier, broken: list[str]) -> None:
        assert barrier.violations(state) == broken


class TestUpdateOrder:
    @pytest.mark.parametrize(
        ("groups", "admitted"),
        [
            ((), ["ab"]),
            ((("a",), ("b",)), ["a", "b"]),
            ((("b",),), ["b", "a"]),
            ((("b",), ("a",)), ["b", "a"]),
            ((("b", "a"),), ["ba"]),
        ],
    )
    def test_groups_are_admitted_one_after_the_other(
        self, groups: tuple[tuple[str, ...], ...], admitted: list[str]
    ) -> None:
        gate, now = order.begin(AB, groups, 1, {"a": 1, "b": 1})  # type: ignore[arg-type]
        seen = ["".join(now)]
        while set(gate.due) - gate.done:
            for name in seen[-1]:
                gate, now = order.finish(gate, (name,))  # type: ignore[arg-type]
                assert order.violations(gate) == []
            if now:
                seen.append("".join(now))
        assert seen == admitted

    def test_the_next_group_waits_for_the_whole_group(self) -> None:
        three = (*AB, agent("c"))
        gate, _ = order.begin(three, (("a", "b"), ("c",)), 1, {"a": 1, "b": 1, "c": 1})  # type: ignore[arg-type]
        gate, now = order.finish(gate, ("a",))  # type: ignore[arg-type]
        assert now == ()
        assert order.finish(gate, ("b",))[1] == ("c",)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("every", "round", "samples", "is_due"),
        [(1, 1, 1, True), (1, 1, 0, False), (0, 1, 9, False), (2, 1, 9, False), (2, 2, 9, True), (4, 6, 9, False)],
    )
    def test_who_is_due(self, every: int, round: int, samples: int, is_due: bool) -> None:
        assert order.due(agent("a", every), round, samples) is is_due

    def test_agents_that_finish_together_let_the_next_group_in(self) -> None:
        gate, _ = order.begin((*AB, agent("c")), (("a", "b"), ("c",)), 1, {"a": 1, "b": 1, "c": 1})  # type: ignore[arg-type]
        after, now = order.finish(gate, ("b", "a"))  # type: ignore[arg-type]
        assert now == ("c",) and order.violations(after) == []

    def test_finishing_twice_or_without_admission_changes_nothing(self) -> None:
        gate, _ = order.begin(AB, (("a",), ("b",)), 1, {"a": 1, "b": 1})  # type: ignore[arg-type]
        assert order.finish(gate, ("b",)) == (gate, ())  # type: ignore[arg-type]
        after, _ = order.finish(gate, ("a",))  # type: ignore[arg-type]
        assert order.finish(after, ("a",)) == (after, ())  # type: ignore[arg-type]

    def test_when_nobody_is_due_nobody_is_admitted(self) -> None:
        gate, now = order.begin(AB, (), 1, {})
        assert now == () and order.violations(gate) == []


class TestVersions:
    ONE = versions.publish(Versions(workers=frozenset({W1, W2})), version("a", 0), blob("d0"))

    def test_a_version_is_ready_when_every_worker_has_acknowledged_it(self) -> None:
        state = self.ONE
        for worker, ready in ((W1, False), (W2, True)):
            state = versions.acknowledge(state, version("a", 0), worker, "d0")
            assert state.ready(version("a", 0)) is ready and versions.violations(state) == []
            assert state.loaded(PolicyName("policy of a"), 0) is ready

    def test_it_is_ready_too_when_the_last_worker_that_lacked_it_leaves(self) -> None:
        state = versions.acknowledge(self.ONE, version("a", 0), W1, "d0")
        assert versions.leave(state, W2).ready(version("a", 0))

    def test_without_workers_nothing_is_ready(self) -> None:
        assert not versions.leave(versions.leave(self.ONE, W1), W2).ready(BASE)

    def test_other_weights_are_refused(self) -> None:
        with pytest.raises(WrongWeights, match="with digest d9"):
            versions.acknowledge(self.ONE, version("a", 0), W1, "d9")

    def test_what_was_never_published_is_refused(self) -> None:
        with pytest.raises(ValueError, match="never published"):
            versions.acknowledge(self.ONE, version("a", 1), W1, "d0")

    @pytest.mark.parametrize(("number", "digest"), [(0, "other"), (-1, "d0")])
    def test_versions_only_rise(self, number: int, digest: str) -> None:
        with pytest.raises(ValueError, match="versions must rise"):
            versions.publish(self.ONE, version("a", number), blob(digest))

    def test_publishing_the_same_again_changes_nothing(self) -> None:
        assert versions.publish(self.ONE, version("a", 0), blob("d0")) is self.ONE

    def test_the_current_version_and_the_one_before_stay(self) -> None:
        state = self.ONE
        for number in (1, 2, 3):
            state = versions.publish(state, version("a", number), blob(f"d{number}"))
        state, old = versions.retire(state, versions.recent(state))
        assert old == (version("a", 0), version("a", 1))
        assert set(state.served) == {version("a", 2), version("a", 3)}

    def test_the_version_before_stays_even_if_numbers_were_left_out(self) -> None:
        state = versions.publish(self.ONE, version("a", 3), blob("d3"))
        assert versions.retire(state, versions.recent(state)) == (state, ())

    def test_a_worker_that_joins_loads_everything_in_use(self) -> None:
        state, wanted = versions.join(self.ONE, W3)
        assert wanted == (version("a", 0),)
        assert state.not_serving(version("a", 0)) == (W1, W2, W3)

    def test_a_current_version_is_loading_again_when_a_worker_joins(self) -> None:
        state = versions.acknowledge(
            versions.acknowledge(self.ONE, version("a", 0), W1, "d0"), version("a", 0), W2, "d0"
        )
        joined, _ = versions.join(state, W3)
        assert (state.loading, joined.loading) == (frozenset(), {"policy of a"})
        assert versions.leave(joined, W3).loading == frozenset()
        assert versions.violations(replace(joined, loading=frozenset())) == ["V4"]

    def test_of_an_older_version_it_is_known_too_whether_it_is_loaded(self) -> None:
        state = versions.acknowledge(
            versions.acknowledge(self.ONE, version("a", 0), W1, "d0"), version("a", 0), W2, "d0"
        )
        state = versions.publish(state, version("a", 1), blob("d1"))
        assert (state.loaded(PolicyName("policy of a"), 0), state.loaded(PolicyName("policy of a"), 1)) == (True, False)

    def test_a_stranger_s_acknowledgement_changes_nothing(self) -> None:
        assert versions.acknowledge(self.ONE, version("a", 0), W3, "d0") is self.ONE


class TestRouting:
    @pytest.mark.parametrize(
        ("serving", "sticky", "in_flight", "chosen"),
        [
            ([], None, {}, None),
            ([W2, W1], None, {}, W1),
            ([W1, W2], None, {W1: 1}, W2),
            ([W1, W2], W1, {W1: 9}, W1),
            ([W2], W1, {W2: 9}, W2),
            ([W3, W2, W1], None, {W1: 2, W2: 1, W3: 1}, W2),
        ],
    )
    def test_sticky_first_then_least_loaded_then_by_name(
        self,
        serving: list[WorkerName],
        sticky: WorkerName | None,
        in_flight: dict[WorkerName, int],
        chosen: WorkerName | None,
    ) -> None:
        assert choose(serving, sticky, in_flight) == chosen


class TestRoster:
    def test_a_name_belongs_to_one_living_peer(self) -> None:
        state = roster.join(Roster(), host_hello("h"), 0.0)
        with pytest.raises(MemberRefused, match="already in use by process 1 on here"):
            roster.join(state, host_hello("h"), 1.0)
        roster.join(roster.leave(state, host_hello("h").name), host_hello("h"), 2.0)

    def test_a_worker_name_belongs_to_one_living_peer(self) -> None:
        state = roster.join(Roster(), server_hello("s"), 0.0)
        other = server_hello("t")
        stolen = type(other)(other.role, other.name, "here", 3, server_hello("s").workers, other.model)
        with pytest.raises(MemberRefused, match="worker names must be unique"):
            roster.join(state, stolen, 0.0)

    def test_a_task_server_needs_workers_and_nobody_else_may_offer_them(self) -> None:
        with pytest.raises(MemberRefused, match="give it at least one pool"):
            roster.join(Roster(), server_hello("s", ""), 0.0)
        offers = server_hello("s")
        with pytest.raises(MemberRefused, match="only a task server may"):
            roster.join(Roster(), type(offers)(host_hello().role, offers.name, "here", 3, offers.workers), 0.0)

    def test_silence_is_measured_from_the_last_message(self) -> None:
        state = roster.join(roster.join(Roster(), host_hello("h"), 0.0), host_hello("i"), 0.0)
        state = roster.hear(state, host_hello("h").name, 20.0)
        assert roster.silent(state, 10.0) == ("i",)

    def test_task_servers_are_those_that_hold_the_model(self) -> None:
        state = Roster()
        for hello in (server_hello("s", model="m2"), server_hello("t"), host_hello(), server_hello("u", model="m2")):
            state = roster.join(state, hello, 0.0)
        assert roster.task_servers(state, "m2") == ("s", "u")
        assert roster.models(state) == ("m2", "m1")
