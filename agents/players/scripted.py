"""A player that is a function: bots, baselines and fixed opponents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from agents.players.player import Answer, Need, Reply

Script = Callable[[Sequence[str], str, Random], str]
"""(heard, prompt, rng) -> reply. `heard` is everything the seat heard so far, its brief first; on a retry `prompt` is the complaint."""


class ScriptedPlayer:
    """A `Player` that answers at once. Its only randomness is `rng`."""

    def __init__(self, script: Script, rng: Random) -> None:
        self._script = script
        self._rng = rng
        self._heard: list[str] = []

    def brief(self, text: str) -> None:
        self._heard.append(text)

    def hear(self, text: str) -> None:
        self._heard.append(text)

    def ask(self, prompt: str, *, attempt: int) -> Need | Reply:
        return Reply(self._script(tuple(self._heard), prompt, self._rng))

    def answer(self, answer: Answer) -> Reply:
        raise ValueError(
            "a scripted player got an answer it did not ask for; only a player that returned a Need is answered"
        )

    def judged(self, *, accepted: bool) -> None:
        pass
