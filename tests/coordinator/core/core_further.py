"""An honest further host as a state machine: it enlists, plays what it is dealt, delivers it until it is settled, and leaves or dies."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core_values import blob, request

from tinker.protocol import to_coordinator as said
from tinker.protocol.to_any import Refused
from tinker.protocol.to_coordinator import RunSpec
from tinker.protocol.to_host import Enlisted, Play, RunStopped, Settled, TurnClosed, TurnRefused
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import BASE, Dealt, EpisodeId, TurnId

if TYPE_CHECKING:
    from core_world import World


@dataclass
class FurtherHost:
    """`deals`: groups in hand, with the episodes that were dealt; `left`: turns that an episode still has; `done`: played, not settled."""

    name: str
    spec: RunSpec
    rng: random.Random
    enlisted: bool = False
    over: bool = False
    retired: bool = False
    deals: dict[Dealt, Play] = field(default_factory=dict)
    left: dict[EpisodeId, int] = field(default_factory=dict)
    turns: dict[EpisodeId, said.OpenTurn] = field(default_factory=dict)
    done: dict[EpisodeId, Dealt] = field(default_factory=dict)

    def enlist(self) -> said.Enlist:
        return said.Enlist(self.spec.run, self.spec.scenario, self.rng.randint(1, 4), self.spec.terms)

    def hear(self, message: object, world: World) -> list[object]:
        if self.over:
            return []
        match message:
            case Enlisted():
                self.enlisted = True
            case Refused() if message.what == "Enlist" and self.spec.run in message.reason:
                learner = next(each for each in world.hosts.values() if each.spec == self.spec)
                self.over = learner.over  # else its run is still to come
            case RunStopped() if message.run == self.spec.run:
                self.over = True
                self.deals, self.left, self.turns, self.done = {}, {}, {}, {}
            case Play():
                world.did["group dealt to a further host"] += 1
                return self.play(message)
            case Settled() if message.run == self.spec.run:
                for deal in message.deals:
                    self.forget(deal)
            case TurnClosed():
                return self.turn_closed(message)
            case TurnRefused():
                current = self.turns.get(message.turn.episode)
                honest = current is not None and current.turn == message.turn
                assert not honest or "any more" in message.reason or "not being played" in message.reason, message
        return []

    def again(self) -> list[object]:
        """What is asked again from time to time."""
        if self.over or not self.enlisted:
            return [] if self.over else [self.enlist()]
        delivered = [self.delivery(deal) for deal in self.deals if any(self.done.get(e) == deal for e in self.done)]
        return [said.InHand(self.spec.run, tuple(self.deals)), *delivered, *self.turns.values()]

    def play(self, message: Play) -> list[object]:
        if message.deal in self.deals:
            return []
        assert message.versions, "a further host is told what to play with"
        older = [
            deal
            for deal in self.deals
            if (deal.round, deal.phase, deal.group) == (message.round, message.phase, message.group)
        ]
        for deal in older:
            assert deal.attempt < message.attempt, "attempts only rise"
            self.forget(deal)
        self.deals[message.deal] = message
        sends: list[object] = []
        for episode in message.episodes:
            self.left[episode] = self.rng.randint(0, 3)
            sends += self.next_turn(message.deal, episode, 0)
        return sends

    def next_turn(self, deal: Dealt, episode: EpisodeId, number: int) -> list[object]:
        self.turns.pop(episode, None)
        if self.left[episode] == 0:
            self.done[episode] = deal
            more = any(each not in self.done for each in self.deals[deal].episodes)
            return [] if more and self.rng.random() < 0.5 else [self.delivery(deal)]
        self.left[episode] -= 1
        versions = self.deals[deal].versions
        seats = self.rng.sample("uvwx", self.rng.randint(1, 3))
        requests = [request(seat * (1 + "uvwx".index(seat)), self.rng.choice([*versions, BASE])) for seat in seats]
        turn = TurnId(self.spec.run, episode, number, deal.attempt)
        self.turns[episode] = said.OpenTurn(turn, tuple(requests), 20.0)
        return [self.turns[episode]]

    def delivery(self, deal: Dealt) -> said.Played:
        episodes = tuple(episode for episode, of in self.done.items() if of == deal)
        return said.Played(self.spec.run, deal, episodes, blob(f"{self.name} {deal} {len(episodes)}"))

    def turn_closed(self, message: TurnClosed) -> list[object]:
        current = self.turns.get(message.turn.episode)
        if current is None or current.turn != message.turn:
            return []
        assert [r.seat for r in message.results] == [r.seat for r in current.requests]
        deal = next(d for d, p in self.deals.items() if message.turn.episode in p.episodes)
        return self.next_turn(deal, message.turn.episode, message.turn.number + 1)

    def forget(self, deal: Dealt) -> None:
        play = self.deals.pop(deal, None)
        for episode in play.episodes if play is not None else ():
            self.left.pop(episode, None)
            self.turns.pop(episode, None)
            self.done.pop(episode, None)

    def check_asked(self, asked: Generate) -> None:
        """The coordinator asks a worker for one of our turns: it is the open one."""
        current = self.turns.get(asked.turn.episode)
        if current is not None and asked.turn.episode in self.left:
            assert current.turn == asked.turn, "only the open turn of a table generates"
            assert (asked.seat, asked.policy) in [(r.seat, r.policy) for r in current.requests]
