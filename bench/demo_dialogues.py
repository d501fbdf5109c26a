"""What the demo base model reads: transcripts of play by sensible and random players, one seat's side at a time.

The prompts of `guess`, `nim` and `dilemma` come from the games in `envs`, so they are word for word those of the shipped
scenarios. Three more small games (poker, split, trade) are here only so that the model reads more than a few sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envs import Dilemma, Game, Guess, Nim
from envs.strategies import Strategy, binary_search, honest_hinter, perfect_nim, tit_for_tat


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt and the answer to it. Answers that were not `legal` are read, but not learned."""

    prompt: str
    answer: str
    legal: bool = True


@dataclass(frozen=True, slots=True)
class Dialogue:
    seat: str
    brief: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a dialogue as the model reads it; `weight` is that of each of its tokens in the loss."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Habits:
    """How players play: with probability `skill` sensibly, else any legal answer; with probability `slips` first an illegal one."""

    skill: float
    slips: float = 0.0


START, END = "<|im_start|>", "<|im_end|>"
PROMPT_WEIGHT = 0.05  # a token of a legal answer weighs 1
SLIPS = ("guess", "take", "higher than 4", "guess 9", "take 9", "call", "i pass", "accept")

Source = Callable[[random.Random, Habits], list[Dialogue]]


def pieces(dialogue: Dialogue) -> list[Piece]:
    """The dialogue in ChatML, as the tokenizer's chat template renders it."""
    parts = [Piece(f"{START}system\n{dialogue.brief}{END}\n", PROMPT_WEIGHT)]
    for said in dialogue.exchanges:
        parts.append(Piece(f"{START}user\n{said.prompt}{END}\n{START}assistant\n", PROMPT_WEIGHT))
        parts.append(Piece(f"{said.answer}{END}", float(said.legal)))
        parts.append(Piece("\n", PROMPT_WEIGHT))
    return parts


def play(game: Game[Any], sensible: Mapping[str, Strategy], rng: random.Random, habits: Habits) -> list[Dialogue]:
    """One whole game, as the dialogue of each seat that acted."""
    told: dict[str, list[Exchange]] = {seat: [] for seat in game.seats}
    brief = {seat: game.brief(seat) for seat in game.seats}
    while seats := game.to_act():
        moves = {}
        for seat in seats:
            prompt = game.view(seat)
            if rng.random() < habits.slips:
                told[seat].append(Exchange(prompt, slip := illegal(game, seat, rng), legal=False))
                prompt = complaint(game, seat, slip)
            by_skill = rng.random() < habits.skill
            answer = sensible[seat]((), game.view(seat), rng) if by_skill else rng.choice(game.answers(seat))
            told[seat].append(Exchange(prompt, answer))
            moves[seat] = game.parse(seat, answer)
        game = game.apply(moves)
    return [Dialogue(seat, brief[seat], tuple(exchanges)) for seat, exchanges in told.items() if exchanges]


def illegal(game: Game[Any], seat: str, rng: random.Random) -> str:
    """Something this seat might wrongly say."""
    said = rng.choice(SLIPS)
    while not complaint(game, seat, said):
        said = rng.choice(SLIPS)
    return said


def complaint(game: Game[Any], seat: str, said: str) -> str:
    """What the parser says to this answer; empty if it is legal."""
    try:
        game.parse(seat, said)
    except ValueError as error:
        return str(error)
    return ""


def guess(rng: random.Random, habits: Habits) -> list[Dialogue]:
    return play(Guess.start(rng), {"hinter": honest_hinter, "guesser": binary_search}, rng, habits)


def nim(rng: random.Random, habits: Habits) -> list[Dialogue]:
    return play(Nim.start(rng), {"alpha": perfect_nim, "beta": perfect_nim}, rng, habits)


def dilemma(rng: random.Random, habits: Habits) -> list[Dialogue]:
    return play(Dilemma.start(rng), {"alpha": tit_for_tat, "beta": tit_for_tat}, rng, habits)


def poker(rng: random.Random, habits: Habits) -> list[Dialogue]:
    """Kuhn poker: one card each, one bet."""

    def decide(card: str, heard: str, open_to: tuple[str, str], by_card: dict[str, str]) -> Exchange:
        sensible = by_card.get(card) or rng.choice(open_to)
        return Exchange(f"card {card}. {heard}", sensible if rng.random() < habits.skill else rng.choice(open_to))

    bets, calls = {"k": "bet", "q": "check"}, {"k": "call", "j": "fold"}
    alpha, beta = rng.sample("jqk", 2)
    opened = decide(alpha, "you open.", ("check", "bet"), bets)
    said = {"alpha": [opened], "beta": []}
    if opened.answer == "bet":
        said["beta"].append(decide(beta, "they bet.", ("call", "fold"), calls))
    else:
        said["beta"].append(decide(beta, "they check.", ("check", "bet"), bets))
        if said["beta"][0].answer == "bet":
            said["alpha"].append(decide(alpha, "they bet.", ("call", "fold"), calls))
    return [Dialogue(seat, f"game poker. you are {seat}. cards j q k.", tuple(side)) for seat, side in said.items()]


def split(rng: random.Random, habits: Habits) -> list[Dialogue]:
    """The ultimatum game: an offer out of a pot of ten, taken or left."""
    offer = rng.randint(2, 5) if rng.random() < habits.skill else rng.randint(0, 9)
    made = Exchange("make an offer.", f"offer {offer}")
    judged = verdict(f"you are offered {offer}.", offer >= 3, rng, habits)
    return [
        Dialogue("proposer", "game split. you are the proposer. the pot is 10.", (made,)),
        Dialogue("responder", "game split. you are the responder.", (judged,)),
    ]


def trade(rng: random.Random, habits: Habits) -> list[Dialogue]:
    """A buyer and a seller with private values, and one bid."""
    worth, cost = rng.randint(1, 9), rng.randint(1, 9)
    bid = rng.randint(1, worth) if rng.random() < habits.skill else rng.randint(1, 9)
    made = Exchange(f"it is worth {worth} to you. make a bid.", f"bid {bid}")
    judged = verdict(f"it costs you {cost}. the bid is {bid}.", bid >= cost, rng, habits)
    return [
        Dialogue("buyer", "game trade. you are the buyer.", (made,)),
        Dialogue("seller", "game trade. you are the seller.", (judged,)),
    ]


def verdict(prompt: str, good: bool, rng: random.Random, habits: Habits) -> Exchange:
    accepted = good if rng.random() < habits.skill else rng.random() < 0.5
    return Exchange(prompt, "accept" if accepted else "reject")


SOURCES: tuple[Source, ...] = (guess, nim, dilemma, guess, poker, split, trade)
"""One batch takes from these in turn; `guess` twice, because comparing two numbers is the last thing the model learns."""
