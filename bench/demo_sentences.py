"""Every sentence that a small base model knows, game by game, as its model card (and, of demo, the page on scenarios) lists them.

`python -m bench.demo_sentences [table]` prints the list. `{1-7}` is any number of this range.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator

from bench.demo_dialogues import SOURCES, TABLE_SOURCES, Dialogue, Habits, Source

GAMES = 3_000  # of each source: enough to meet every sentence, and both ends of every range
NUMBER = re.compile(r"\d+")


def listing(sources: Iterable[Source] = SOURCES) -> str:
    """All games: one paragraph for the seats of a game that are told the same, apart from their names."""
    return "\n\n".join(paragraph for source in dict.fromkeys(sources) for paragraph in paragraphs(source)) + "\n"


def paragraphs(source: Source) -> Iterator[str]:
    """One game, as a sample of the training data says it."""
    rng = random.Random(0)
    dialogues = [dialogue for _ in range(GAMES) for dialogue in source(rng, Habits(skill=0.3, slips=0.3))]
    seats: dict[tuple[str, ...], list[str]] = {}
    for seat in sorted({dialogue.seat for dialogue in dialogues}):
        seats.setdefault(tuple(_said(dialogues, seat)), []).append(seat)
    for said, alike in seats.items():
        briefs = [
            line for seat in alike for line in _lines("brief", {one.brief for one in dialogues if one.seat == seat})
        ]
        yield "\n".join([f"{source.__name__}: {', '.join(alike)}", *briefs, *said])


def _said(dialogues: Iterable[Dialogue], seat: str) -> Iterator[str]:
    """What this seat is asked, is told after an illegal answer (`again`), and answers."""
    prompts: set[str] = set()
    again: set[str] = set()
    answers: set[str] = set()
    for dialogue in dialogues:
        legal = True
        for exchange in dialogue.exchanges if dialogue.seat == seat else ():
            (prompts if legal else again).add(exchange.prompt)
            if legal := exchange.legal:
                answers.add(exchange.answer)
    yield from _lines("prompt", prompts)
    yield from _lines("again", again)
    yield from _lines("answer", answers)


def _lines(kind: str, sentences: Iterable[str]) -> Iterator[str]:
    """Sentences that differ only in numbers as one, with the range of each number."""
    alike: dict[str, list[list[int]]] = {}
    for sentence in sorted(sentences):
        alike.setdefault(NUMBER.sub("{}", sentence), []).append([int(number) for number in NUMBER.findall(sentence)])
    for shape, numbers in alike.items():
        ranges = [(min(column), max(column)) for column in zip(*numbers, strict=True)]
        text = shape.format(*(str(low) if low == high else f"{{{low}-{high}}}" for low, high in ranges))
        yield f"  {kind:6}  {text}"


if __name__ == "__main__":
    print(listing(TABLE_SOURCES if sys.argv[1:] == ["table"] else SOURCES), end="")
