"""A player whose replies a policy samples: it keeps the seat's token context, and remembers who produced every token.

The context only grows. What was sampled stays as it was sampled (it is never decoded and encoded again), so the prompt of every ask
begins with the previous prompt and answer, and the trajectory is exactly what the engine saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agents.players.player import Answer, Cut, Need, Reply
from tinker.protocol.episodes import Span, Trajectory
from tinker.protocol.values import AgentName, Finish, PolicyVersion, Sampling, SeatName, pack_floats, pack_ids
from tinker.tokens import ChatTemplate

_CUTS = {Finish.STOP: Cut.NO, Finish.LENGTH: Cut.LENGTH, Finish.CONTEXT: Cut.CONTEXT}


@dataclass(frozen=True, slots=True)
class Playing:
    """Who plays, and how. `context`: tokens the model can hold; `max_tokens` is per reply. `learn_from_forfeits`: replies that did not
    parse are trained on as well."""

    agent: AgentName
    seat: SeatName
    policy: PolicyVersion
    max_tokens: int
    context: int
    temperature: float = 1.0
    learn_from_forfeits: bool = False


@dataclass(slots=True)
class _Piece:
    """One sampled reply: tokens [start, end) of the context."""

    start: int
    end: int
    version: int
    logprobs: list[float]
    accepted: bool | None = None  # None: not judged yet


class PolicyPlayer:
    """A `Player`. `seed(ask)` gives the sampling seed of the seat's ask number 0, 1, ... (retries are asks of their own).

    A reply budget that does not fit into the context is lowered; a prompt that leaves no room at all is not appended: this ask and all
    later ones are answered with an empty reply cut by the context, without a request.
    """

    def __init__(self, template: ChatTemplate, playing: Playing, seed: Callable[[int], int]) -> None:
        self._template = template
        self._playing = playing
        self._seed = seed
        self._stop_ids = tuple(sorted(template.end_ids))
        self._system: str | None = None
        self._heard: list[str] = []
        self._ids: list[int] = []
        self._pieces: list[_Piece] = []
        self._asks = self._retries = self._rejected = self._unanswered = 0
        self._end: int | None = None  # the id that closed the last answer
        self._asked: Need | None = None
        self._full = False
        self._cut = Cut.NO

    @property
    def label(self) -> str:
        """Who this is, in recordings."""
        return f"{self._playing.agent}@{self._playing.policy.version}"

    def brief(self, text: str) -> None:
        if self._system is not None or self._heard or self._asks:
            raise ValueError(
                f"seat {self._playing.seat} was briefed late or twice; brief once, before anything else at that seat"
            )
        self._system = text

    def hear(self, text: str) -> None:
        self._heard.append(text)

    def ask(self, prompt: str, *, attempt: int) -> Need | Reply:
        asked, self._asks = self._asks, self._asks + 1
        self._retries += attempt > 0
        self._unanswered += self._asked is not None
        self._asked = None
        user = "\n".join([*self._heard, prompt])
        ids = self._prompt_ids(user)
        room = self._playing.context - len(self._ids) - len(ids)
        self._full = self._full or room <= 0
        if self._full:
            self._cut = Cut.CONTEXT
            return Reply("", Cut.CONTEXT)
        self._heard.clear()
        self._ids += ids
        self._end = None
        budget = min(room, self._playing.max_tokens)
        sampling = Sampling(budget, self._playing.temperature, self._seed(asked), self._stop_ids)
        self._asked = Need(self._playing.policy, list(self._ids), sampling)
        return self._asked

    def _prompt_ids(self, user: str) -> list[int]:
        if not self._ids:
            return self._template.opening(self._system, user)
        return self._template.continuation(user, self._end is not None, self._end)

    def answer(self, answer: Answer) -> Reply:
        if self._asked is None:
            raise ValueError(f"seat {self._playing.seat} got an answer it did not ask for; ask first, and answer once")
        if answer.version.policy != self._playing.policy.policy:
            raise ValueError(
                f"seat {self._playing.seat} plays {self._playing.policy} but the answer is from {answer.version}"
            )
        lowered = self._asked.sampling.max_tokens < self._playing.max_tokens
        self._asked = None
        start = len(self._ids)
        self._ids += answer.ids
        self._pieces.append(_Piece(start, len(self._ids), answer.version.version, _finite(answer)))
        last = answer.ids[-1] if answer.ids else None
        self._end = last if last in self._template.end_ids else None
        self._cut = _CUTS[answer.finish]
        if lowered and self._cut is Cut.LENGTH:
            self._cut = Cut.CONTEXT  # it was the context that lowered the budget
        return Reply(self._template.tokenizer.decode(answer.ids), self._cut)

    def judged(self, *, accepted: bool) -> None:
        self._rejected += not accepted
        if self._pieces and self._pieces[-1].accepted is None:
            self._pieces[-1].accepted = accepted

    def trajectory(self) -> Trajectory:
        """What the learner gets. The mask is 1 exactly on sampled tokens (their end token included) of accepted replies, and of
        rejected ones under `learn_from_forfeits`. A sampled token whose logprob the engine did not give (or gave as NaN or infinite)
        is masked and has logprob NaN, so that it can be counted. A reply nobody judged is not trained on."""
        mask = np.zeros(len(self._ids), np.bool_)
        logprobs = np.zeros(len(self._ids), np.float32)
        for piece in self._pieces:
            here = slice(piece.start, piece.end)
            logprobs[here] = piece.logprobs
            learned = piece.accepted is True or (piece.accepted is False and self._playing.learn_from_forfeits)
            mask[here] = np.isfinite(logprobs[here]) if learned else False
        playing = self._playing
        return Trajectory(
            seat=playing.seat,
            agent=playing.agent,
            policy=playing.policy.policy,
            ids=pack_ids(self._ids),
            mask=mask.astype(np.uint8).tobytes(),
            logprobs=pack_floats(logprobs),
            spans=_spans(self._pieces),
            temperature=playing.temperature,
            sampled=sum(piece.end - piece.start for piece in self._pieces),
            retries=self._retries,
            forfeits=self._rejected + self._unanswered + (self._asked is not None) - self._retries,
            cut=str(self._cut),
        )


def _finite(answer: Answer) -> list[float]:
    """One number per id: the logprob, or NaN where there is none."""
    given: Sequence[float | None] = answer.logprobs
    padded = [*given, *[None] * len(answer.ids)][: len(answer.ids)]
    return [value if value is not None and math.isfinite(value) else math.nan for value in padded]


def _spans(pieces: Sequence[_Piece]) -> tuple[Span, ...]:
    """One span per run of replies of the same version; empty replies have none."""
    spans: list[Span] = []
    for piece in pieces:
        if piece.start == piece.end:
            continue
        if spans and spans[-1].version == piece.version:
            spans[-1] = replace(spans[-1], end=piece.end)
        else:
            spans.append(Span(piece.version, piece.start, piece.end))
    return tuple(spans)
