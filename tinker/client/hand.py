"""What this host was dealt: groups of episodes, until they are settled or their phase is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinker.protocol.to_host import Play
from tinker.protocol.values import Dealt, EpisodeId, Phase


@dataclass(slots=True)
class Hand:
    """`open`: of each group the episodes that we are not done with. The learner host is done with one when it has accounted for it; a
    further host has a group until it is settled."""

    open: dict[Dealt, set[EpisodeId]] = field(default_factory=dict)
    _where: dict[EpisodeId, Dealt] = field(default_factory=dict)

    def take(self, play: Play) -> bool:
        """We were dealt this; whether that is new."""
        if play.deal in self.open:
            return False
        self.open[play.deal] = set(play.episodes)
        self._where |= dict.fromkeys(play.episodes, play.deal)
        return True

    def done(self, episode: EpisodeId) -> None:
        deal = self._where.pop(episode, None)
        if deal in self.open:
            self.open[deal].discard(episode)

    def settle(self, deals: tuple[Dealt, ...]) -> None:
        for deal in deals:
            for episode in self.open.pop(deal, ()):
                self._where.pop(episode, None)

    def end(self, round: int, phase: Phase) -> None:
        """This phase is over."""
        self.settle(tuple(deal for deal in self.open if (deal.round, deal.phase) == (round, phase)))

    @property
    def deals(self) -> tuple[Dealt, ...]:
        """The groups in hand."""
        return tuple(deal for deal, left in self.open.items() if left)
