"""Who sits on a seat. A player hears things, is asked for replies, and either answers at once or names what must be generated for it.

Players do no I/O: the table collects the generations that its admitted seats need, has them done in one turn, and hands each player its
result. So a scenario never knows where a player runs, and a player never knows how a turn is played.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tinker.protocol.values import Finish, PolicyVersion, Sampling


@dataclass(frozen=True, slots=True)
class Need:
    """The player's reply must be generated: these ids (its whole context) under this version."""

    policy: PolicyVersion
    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """What the pool answered to a `Need`."""

    ids: list[int]
    logprobs: list[float]
    finish: Finish
    version: PolicyVersion
    worker: str = ""
    busy: float = 0.0


class Cut(StrEnum):
    """Whether, and by which limit, a reply was cut off. A cut reply is never parsed."""

    NO = ""
    LENGTH = "length"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a player said. `text` holds no special tokens."""

    text: str
    cut: Cut = Cut.NO


class Player(Protocol):
    """A player of one seat in one episode; made anew for every episode."""

    def brief(self, text: str) -> None:
        """Standing instructions (a chat template's system message); at most once, before anything else."""

    def hear(self, text: str) -> None:
        """Something reaches the seat; it will be part of its next prompt."""

    def ask(self, prompt: str, *, attempt: int) -> Need | Reply:
        """The seat is admitted and must reply. `attempt` counts from 0; above 0 the prompt is the parser's complaint."""

    def answer(self, answer: Answer) -> Reply:
        """The generation this player asked for is here."""

    def judged(self, *, accepted: bool) -> None:
        """Whether the last reply parsed. A player that learns masks what was not accepted, unless told otherwise."""
