"""What was asked and is not answered yet: sent again, with growing pauses, until its answer comes.

Messages are lost with the connection or the process they travelled to, so whoever waits for an answer asks again. Everything asked here
takes effect once, however often it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from tinker.runtime.pauses import Pauses

FIRST, LONGEST = 2.0, 10.0  # seconds until something is asked again: at first, and at most


@dataclass(slots=True)
class Question:
    """`due`: when it is asked again; `pause`: about how long it has waited for that."""

    message: Any
    due: float
    pause: float = FIRST

    def again(self, now: float, pauses: Pauses) -> None:
        """It is asked now, and waits longer for the next time."""
        self.pause = min(2 * self.pause, LONGEST)
        self.due = now + pauses.about(self.pause)


class Asked:
    """Questions by key, in the order in which they were first asked."""

    def __init__(self, pauses: Pauses) -> None:
        self._open: dict[Hashable, Question] = {}
        self._pauses = pauses
        self._probed = -1

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, key: Hashable, message: Any, now: float) -> None:
        """It was asked just now; a question of the same key is replaced."""
        self._open[key] = Question(message, now + FIRST)

    def drop(self, key: Hashable) -> Any:
        """It needs no answer any more; returns the message if it was open."""
        question = self._open.pop(key, None)
        return question.message if question else None

    def drop_all(self, which: Callable[[Hashable], bool]) -> list[Any]:
        """Drop every question whose key is one of these; returns the messages."""
        return [self.drop(key) for key in list(self._open) if which(key)]

    def overdue(self, now: float) -> Iterator[Any]:
        """What must be asked again now; each waits longer afterwards."""
        for question in list(self._open.values()):
            if question.due <= now:
                question.again(now, self._pauses)
                yield question.message

    def everything(self, now: float) -> Iterator[Any]:
        """Everything, because the other end may know nothing of it."""
        for question in list(self._open.values()):
            question.due, question.pause = now + FIRST, FIRST
            yield question.message

    def next(self) -> Any:
        """One of the open questions, each time another, to see whether anybody listens. When it is asked again does not change."""
        self._probed += 1
        return list(self._open.values())[self._probed % len(self._open)].message

    def names(self, kind: str) -> bool:
        """Whether a message of this kind is asked."""
        return any(type(question.message).__name__ == kind for question in self._open.values())

    def clear(self) -> None:
        self._open.clear()
