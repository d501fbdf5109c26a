"""Fakes at the waist for the tests of scenarios: players that need generations, and turns that make them by script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import anyio
from anyio.lowlevel import checkpoint

from agents.players.player import Answer, Cut, Need, Player, Reply
from agents.players.scripted import Script, ScriptedPlayer
from scenarios import Forfeited, Identity, Limits, Scenario, Table, play_episode, scenario
from tinker.protocol.episodes import Episode
from tinker.protocol.values import BASE, EpisodeId, Finish, Phase, Sampling, SeatName

CUTS = {Finish.STOP: Cut.NO, Finish.LENGTH: Cut.LENGTH, Finish.CONTEXT: Cut.CONTEXT}
Writing = Callable[[str], str | Finish | Forfeited]  # the whole context as text -> what is generated, or how it fails


class Writer:
    """A player that needs a generation for every reply; its tokens are the code points of its context."""

    def __init__(self) -> None:
        self.context: list[str] = []
        self.prompts: list[str] = []
        self.verdicts: list[bool] = []

    def brief(self, text: str) -> None:
        self.context.append(text)

    def hear(self, text: str) -> None:
        self.context.append(text)

    def ask(self, prompt: str, *, attempt: int) -> Need | Reply:
        self.context.append(prompt)
        self.prompts.append("\n".join(self.context))
        return Need(BASE, [ord(letter) for letter in self.prompts[-1]], Sampling(max_tokens=100))

    def answer(self, answer: Answer) -> Reply:
        text = "".join(map(chr, answer.ids))
        self.context.append(text)
        return Reply(text, CUTS[answer.finish])

    def judged(self, *, accepted: bool) -> None:
        self.verdicts.append(accepted)


class ScriptedTurns:
    """Answers every need by its seat's script, each after so many checkpoints as `delays` says next; results come as they complete."""

    def __init__(self, scripts: Mapping[str, Writing], delays: Sequence[int] = ()) -> None:
        self.opened: list[tuple[int, tuple[str, ...]]] = []
        self._scripts = scripts
        self._delays = list(delays)

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        self.opened.append((number, tuple(needs)))
        results: dict[SeatName, Answer | Forfeited] = {}

        async def generate(seat: SeatName, need: Need, delay: int) -> None:
            for _ in range(delay):
                await checkpoint()
            results[seat] = answer(self._scripts[seat]("".join(map(chr, need.prompt))), seat)

        async with anyio.create_task_group() as group:
            for seat, need in needs.items():
                group.start_soon(generate, seat, need, self._delays.pop() if self._delays else 0)
        return results


def answer(made: str | Finish | Forfeited, seat: SeatName) -> Answer | Forfeited:
    if isinstance(made, Forfeited):
        return made
    text, finish = ("half a rep", made) if isinstance(made, Finish) else (made, Finish.STOP)
    return Answer([ord(letter) for letter in text], [0.0] * len(text), finish, BASE)


def lines(*texts: str) -> Script:
    """A script that says these one after the other, then the last for ever."""
    left = list(texts)
    return lambda heard, prompt, rng: left.pop(0) if len(left) > 1 else left[0]


def scripted(**scripts: Script) -> dict[SeatName, Player]:
    return {SeatName(seat): ScriptedPlayer(script, Random(seat)) for seat, script in scripts.items()}


def writers(*seats: str) -> dict[SeatName, Writer]:
    return {SeatName(seat): Writer() for seat in seats}


NOBODY = ScriptedTurns({})
USUAL = Limits()


async def play(
    played: Scenario,
    players: Mapping[SeatName, Player],
    turns: ScriptedTurns = NOBODY,
    *,
    seed: int = 0,
    index: int = 0,
    limits: Limits = USUAL,
    clock: Callable[[], float] = lambda: 0.0,
    evaluation: str = "",
    **params: object,
) -> Episode:
    identity = Identity("run", EpisodeId(1, Phase.ROLLOUT, index), evaluation=evaluation)
    return await play_episode(
        played, players, turns, identity=identity, rng_seed=seed, params=params, limits=limits, clock=clock
    )


def heard(episode: Episode, seat: str) -> str:
    """Everything that reached a seat."""
    return "\n".join(line.text for line in episode.recording.lines if line.seat == seat)


def bracketed(text: str) -> int:
    """The number in `[7]`."""
    if not (text.startswith("[") and text.endswith("]") and text[1:-1].isdecimal()):
        raise ValueError("Write your bid as a number in brackets, like [7].")
    return int(text[1:-1])


@scenario("ann", "bob", version=1, retries=1)
async def auction(table: Table, *, highest: int = 100) -> dict[str, float]:
    """Private values; each bidder may talk once; sealed bids; second price."""
    worth = {seat.name: table.rng.randint(1, highest) for seat in table}
    for seat in table:
        seat.brief("You are a bidder.")
        seat.hear(f"The item is worth {worth[seat.name]} to you.")
    for seat in table:
        table.say(seat, await seat.act("Say one line to the other bidder.", str))
    bids = await table.act_all("Your sealed bid, like [7]:", bracketed)
    placed = sorted(((bid, name) for name, bid in bids.items() if not isinstance(bid, Forfeited)), reverse=True)
    table.measure("bids", len(placed))
    winner = placed[0][1] if placed else ""
    price = placed[1][0] if len(placed) > 1 else 0
    return {name: worth[name] - price if name == winner else 0 for name in worth}


def bidder(heard: Sequence[str], prompt: str, rng: Random) -> str:
    """Bids what the item is worth to it, sometimes without the brackets."""
    if prompt.startswith("Say"):
        return f"I bid like nobody else, {rng.random():.6f}"
    worth = next(line.split()[4] for line in heard if line.startswith("The item is worth"))
    return f"[{worth}]" if rng.random() < 0.7 else f"{worth} dollars"


CROWD = tuple(f"s{number}" for number in range(8))


@scenario(*CROWD, version=1, retries=1)
async def crowd(table: Table) -> dict[str, float]:
    """Eight seats name a number at once, three times; some have to try again."""
    total = dict.fromkeys(CROWD, 0.0)
    for _ in range(3):
        moves = await table.act_all("Your number:", bracketed)
        for seat, move in moves.items():
            total[seat] += -1 if isinstance(move, Forfeited) else move
            table.say(seat, f"{seat} has {total[seat]}")
    return total


def writing(seat: str) -> Writing:
    """A seat's script, a function of its context alone: numbers, nonsense, and now and then a passed deadline."""

    def write(context: str) -> str | Forfeited:
        rng = Random(f"{seat} {context}")
        if rng.random() < 0.1:
            return Forfeited(seat, "passed its deadline")
        return f"[{rng.randrange(100)}]" if rng.random() < 0.6 else "hm"

    return write


async def play_crowd(delays: Sequence[int], seed: int = 0) -> Episode:
    turns = ScriptedTurns({seat: writing(seat) for seat in CROWD}, delays)
    return await play(crowd, writers(*CROWD), turns, seed=seed)
