"""An honest learner host whose agents may lag: it plays on while they update, each at its own pace, and checks what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from core_hosts import At, Host, Slowly, schedule
from core_values import arrival

from tinker.protocol import to_coordinator as said
from tinker.protocol.to_coordinator import AgentSpec, Straggler
from tinker.protocol.to_host import MayUpdate, Opened, UpdateEnded
from tinker.protocol.values import Edge, Phase


@dataclass
class LaggingHost(Host):
    """`queue`: rounds whose update of an agent has not begun; `busy`: the one that it is in. `ready`: the version whose loading was
    acknowledged; `marks`: (round, version) of the ends of its updates. `to_come`: agents that have still to come to the next barrier.
    `overlapped`: updates that ended when a later round was played already."""

    queue: dict[str, list[int]] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    ready: dict[str, tuple[int, str]] = field(default_factory=dict)
    marks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    came_with: dict[str, int] = field(default_factory=dict)
    to_come: set[str] = field(default_factory=set)
    next_at: At | None = None
    overlapped: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queue = {each.name: [] for each in self.spec.agents}
        self.marks = {each.name: [] for each in self.spec.agents}

    @property
    def over(self) -> bool:
        ended = len(self.opened) == len(schedule(self.spec)) and not self.busy and not any(self.queue.values())
        return self.lost or bool(self.stopped) or ended

    def story(self) -> object:
        return super().story(), self.queue, self.busy, self.to_come, self.next_at

    def hear(self, message: object, world: object) -> list[object]:
        if isinstance(message, UpdateEnded) and not self.stopped:
            return self.ended(message)
        return super().hear(message, world)  # type: ignore[arg-type]

    def of(self, name: str) -> AgentSpec:
        return next(each for each in self.spec.agents if each.name == name)

    # --- the play track ---

    def passed(self, opened: Opened) -> list[object]:
        at = (opened.round, opened.phase, opened.edge)
        seen = [each for each in self.opened if (each.round, each.phase, each.edge) == at]
        if seen:
            assert seen == [opened], "a barrier opens once, and its opening is always told the same"
            return []
        assert at == schedule(self.spec)[len(self.opened)], f"{at} opened out of turn"
        if opened.phase == Phase.ROLLOUT and opened.edge == Edge.START:
            self.left_out = set()
        self.leave_out(opened)
        self.opened.append(opened)
        self.bound = dict(zip(opened.policies, opened.numbers, strict=True))
        if opened.edge == Edge.START:
            self.check_bound(opened)
            self.to_come = set()
            return []
        assert not self.playing, "a phase ended while episodes were played"
        sends: list[object] = []
        if opened.phase == Phase.ROLLOUT:
            for each in self.spec.agents:
                if each.name not in self.left_out:
                    self.queue[each.name].append(opened.round)
                    sends += self.pump(each)
        after = schedule(self.spec)[len(self.opened) :]
        self.next_at = after[0] if after else None
        everybody = self.left_out if after and after[0][1] == Phase.EVALUATE else set()
        self.to_come = {each.name for each in self.spec.agents if each.name not in everybody} if after else set()
        return [*sends, *self.come(), *self.end()]

    def check_bound(self, opened: Opened) -> None:
        """I1: the version an agent came with, and no update that must have ended is missing."""
        for each in self.spec.agents:
            if each.name in self.left_out:
                continue
            assert self.bound[each.policy] == self.came_with[each.name], "it plays with what its agent came with"
            assert self.paced(each, (opened.round, opened.phase, opened.edge)), "a rollout began too early"

    def leave_out(self, opened: Opened) -> None:
        everybody = {each.name for each in self.spec.agents} - self.left_out
        if opened.edge == Edge.START:
            assert sorted(opened.members + opened.dropped) == sorted(everybody)
        if not opened.dropped:
            return
        (rule,) = [each for each in self.spec.barriers if (each.phase, each.edge) == (opened.phase, opened.edge)]
        assert rule.straggler == Straggler.DROP and rule.deadline
        if opened.edge == Edge.START:
            assert len(opened.members) >= rule.quorum
            self.left_out |= set(opened.dropped)
            return
        self.dropped += opened.dropped
        for episode in [each for each in self.played if str(each) in opened.dropped]:
            self.playing.pop(episode, None)
            self.turns.pop(episode, None)

    def paced(self, each: AgentSpec, at: At) -> bool:
        newest = at[0] - 1 - each.max_lag if at[1] == Phase.ROLLOUT else at[0]
        rounds = [*self.queue[each.name], *([self.busy[each.name]] if each.name in self.busy else [])]
        return all(round > newest for round in rounds)

    def arrive_all(self, at: At) -> list[object]:
        self.next_at, self.to_come = at, {each.name for each in self.spec.agents}
        return self.come()

    def come(self) -> list[object]:
        """Whoever is awaited at the next barrier and may come, comes."""
        at = self.next_at
        if at is None:
            return []
        here = [each for each in self.spec.agents if each.name in self.to_come and self.paced(each, at)]
        self.rng.shuffle(here)
        sends: list[object] = []
        for each in here:
            number, digest = self.ready.get(each.name, (self.version[each.name], self.digests.get(each.name, "")))
            self.to_come.discard(each.name)
            self.came_with[each.name] = number
            one = said.Arrive(self.spec.run, *at, each.name, number, 0, digest)
            sends.append(Slowly(one) if self.spec.barriers and self.rng.random() < 0.3 else one)
        return sends

    def end(self) -> list[object]:
        return [said.EndRun(self.spec.run, "finished")] if self.over and not self.stopped and not self.lost else []

    def wrong_arrivals(self) -> list[object]:
        """Who would come to the next barrier too early, or with a version that is too old for it."""
        at = self.next_at
        if at is None or at[1] != Phase.ROLLOUT:
            return []
        found: list[object] = []
        for each in self.spec.agents:
            newest = at[0] - 1 - each.max_lag
            oldest = max((version for round, version in self.marks[each.name] if round <= newest), default=0)
            if not self.paced(each, at):
                found.append(arrival(each.name, *at, self.version[each.name], run=self.spec.run))
            elif each.name in self.to_come and oldest:
                found.append(arrival(each.name, *at, oldest - 1, run=self.spec.run))
        return found

    # --- the update track ---

    def pump(self, each: AgentSpec) -> list[object]:
        """Begin the update of the oldest round that is left."""
        if each.name in self.busy or not self.queue[each.name]:
            return []
        round = self.queue[each.name].pop(0)
        self.busy[each.name] = round
        rows = self.rng.randint(0, 2)
        if rows == 0 or each.every == 0 or round % each.every:
            return [self.back(each)]
        return [arrival(each.name, round, Phase.UPDATE, Edge.START, self.version[each.name], rows, self.spec.run)]

    def back(self, each: AgentSpec) -> object:
        at = self.busy[each.name], Phase.UPDATE, Edge.END
        digest = self.digests.get(each.name, "")
        return said.Arrive(self.spec.run, *at, each.name, self.version[each.name], 0, digest)

    def update(self, gate: MayUpdate) -> list[object]:
        each = self.of(gate.agent)
        if self.busy.get(each.name) != gate.round or f"{each.name} {gate.round}" in self.admitted:  # told again
            assert f"{each.name} {gate.round}" in self.admitted, "admitted to an update it did not ask for"
            return []
        self.admitted.append(f"{each.name} {gate.round}")
        groups = [list(group) for group in self.spec.update_order]
        named = [name for group in groups for name in group]
        groups.append([other.name for other in self.spec.agents if other.name not in named])
        here = next(k for k, group in enumerate(groups) if each.name in group)
        for other in [other for group in groups[:here] for other in group]:
            waits = self.busy.get(other) == gate.round or gate.round in self.queue[other]
            # its coming back may be known already, although the answer to it is under way
            assert not waits or not self.plan[other], f"{each.name} was let in before {other}"
        self.plan[each.name] = [*self.rng.choice(([], ["score"])), "gradient", "step", "publish"]
        first = self.next_operation(each)
        return [Slowly(one) for one in first] if self.rng.random() < 0.5 else first

    def next_operation(self, each: AgentSpec) -> list[object]:
        if not self.plan[each.name] and each.name in self.busy:
            back = self.back(each)
            return [Slowly(back) if self.rng.random() < 0.2 else back]
        return super().next_operation(each)

    def ended(self, message: UpdateEnded) -> list[object]:
        each = self.of(message.agent)
        if self.busy.get(each.name) != message.round:  # told again
            return []
        del self.busy[each.name]
        self.ready[each.name] = self.version[each.name], self.digests.get(each.name, "")
        self.marks[each.name].append((message.round, self.version[each.name]))
        updated = f"{each.name} {message.round}" in self.admitted
        self.overlapped += updated and self.opened[-1].round > message.round
        return [*self.pump(each), *self.come(), *self.end()]
