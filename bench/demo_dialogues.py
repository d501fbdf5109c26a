"""What the small base models read: transcripts of play by sensible and random players, one seat's side at a time.

The prompts of `guess`, `nim` and `dilemma`, and of `auction` and `negotiate`, come from the games in `envs`, so they are word for word
those of the shipped scenarios. The demo model reads three more small games (poker, split, trade); those of `relay` are that scenario's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envs import Auction, Dilemma, Game, Guess, Negotiate, Nim
from envs.strategies import (
    Strategy,
    binary_search,
    fair_negotiator,
    honest_hinter,
    perfect_nim,
    tit_for_tat,
    truthful_bidder,
)


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


def auction(rng: random.Random, habits: Habits) -> list[Dialogue]:
    return play(Auction.start(rng), dict.fromkeys(Auction.seats, truthful_bidder), rng, habits)


def negotiate(rng: random.Random, habits: Habits) -> list[Dialogue]:
    return play(Negotiate.start(rng), dict.fromkeys(Negotiate.seats, fair_negotiator), rng, habits)


def relay(rng: random.Random, habits: Habits) -> list[Dialogue]:
    """A word goes from seat to seat. The second may leave instead of passing it on; the last comes late."""

    def told(who: str, word: int, prompt: str, may_leave: bool = False) -> Dialogue:
        said = word if rng.random() < habits.skill else rng.randint(*RELAYED)
        answer = "leave" if may_leave and rng.random() < 0.5 else f"say {said}"
        return Dialogue(who, f"game relay. you are {who}.", (Exchange(prompt.format(word), answer),))

    north = told("north", rng.randint(*RELAYED), "the word is {}. pass it on.")
    word = int(north.exchanges[0].answer[-1])
    east = told("east", word, "they say {}. pass it on or leave.", may_leave=True)
    word = word if east.exchanges[0].answer == "leave" else int(east.exchanges[0].answer[-1])
    south = told("south", word, "they say {}. pass it on.")
    west = told("west", int(south.exchanges[0].answer[-1]), "they say {}. what is the word?")
    return [north, east, south, west]


RELAYED = (1, 7)  # the words

TABLE_SOURCES: tuple[Source, ...] = (auction, negotiate, relay, auction)
"""What the `table` model reads instead; `auction` twice, because only its bids need a number that was said before the last."""

SOURCES: tuple[Source, ...] = (guess, nim, dilemma, guess, poker, split, trade)
"""One batch takes from these in turn; `guess` twice, because comparing two numbers is the last thing the model learns."""
