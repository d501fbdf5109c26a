"""Players that are not models, for the games here: the perfect, the sensible and the random ones.

Each is a function `(heard, prompt, rng) -> text`, the form in which scenarios take scripted players. They read the prompt, and
the brief where the rules have parameters.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from envs.auction import MOST as HIGHEST_BID
from envs.auction import WORDS
from envs.dilemma import COOPERATE, DEFECT
from envs.guess import HINTS
from envs.kuhn import BET, CALL, CHECK, FOLD
from envs.negotiate import ACCEPT, WALK
from envs.negotiate import MOST as HIGHEST_PRICE
from envs.nim import LOST, MOST

Strategy = Callable[[Sequence[str], str, random.Random], str]


def honest_hinter(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Guess: say truly where the secret is."""
    secret, guess = numbers(prompt)
    return "higher" if secret > guess else "lower"


def random_hinter(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Guess: say anything."""
    return rng.choice(HINTS)


def binary_search(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Guess: halve what the hints leave; any number once they contradict each other."""
    lowest, highest = 1, largest_secret(heard)
    for hint, number in re.findall(r"(higher|lower) than (\d+)", prompt):
        lowest = max(lowest, int(number) + 1) if hint == "higher" else lowest
        highest = min(highest, int(number) - 1) if hint == "lower" else highest
    return f"guess {(lowest + highest) // 2}" if lowest <= highest else random_guesser(heard, prompt, rng)


def random_guesser(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Guess: any number."""
    return f"guess {rng.randint(1, largest_secret(heard))}"


def largest_secret(heard: Sequence[str]) -> int:
    """What the guesser's brief says of the secret; 7 for one who was not briefed."""
    return numbers(heard[0])[-1] if heard else 7


def perfect_nim(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Nim: leave a multiple of four; take anything where that cannot be done."""
    (pile,) = numbers(prompt)
    return f"take {pile % LOST}" if pile % LOST else random_nim(heard, prompt, rng)


def random_nim(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Nim: take any legal number."""
    (pile,) = numbers(prompt)
    return f"take {rng.randint(1, min(MOST, pile))}"


def tit_for_tat(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Dilemma: cooperate first, then do what the other did."""
    return DEFECT if DEFECT in prompt else COOPERATE


def random_dilemma(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Dilemma: cooperate half the time."""
    return rng.choice((COOPERATE, DEFECT))


def equilibrium_kuhn(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Kuhn: nothing is to be won from it. Alpha bluffs with the jack one time in five, bets the king three times in five."""
    card, bet = prompt.split()[1][0], "they bet" in prompt
    if bet:
        calls = {"j": 0.0, "q": 8 / 15 if _opened(heard) else 1 / 3, "k": 1.0}
        return CALL if rng.random() < calls[card] else FOLD
    bets = {"j": 1 / 5, "q": 0.0, "k": 3 / 5} if "you open" in prompt else {"j": 1 / 3, "q": 0.0, "k": 1.0}
    return BET if rng.random() < bets[card] else CHECK


def random_kuhn(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Kuhn: anything legal."""
    return rng.choice((CALL, FOLD) if "they bet" in prompt else (CHECK, BET))


def truthful_bidder(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Auction: say how much it is worth, and bid that."""
    (worth,) = numbers(prompt)
    return f"bid {worth}" if prompt.endswith("bid.") else WORDS[worth > HIGHEST_BID // 2]


def random_bidder(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Auction: anything legal."""
    return f"bid {rng.randint(0, HIGHEST_BID)}" if prompt.endswith("bid.") else rng.choice(WORDS)


def fair_negotiator(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Negotiate: take what gains anything, else offer a price between one's own and theirs; no deal at a loss."""
    own, *offered = numbers(prompt)
    buys = "worth" in prompt
    if offered and (own > offered[0] if buys else offered[0] > own):
        return ACCEPT
    if "last word" in prompt or (offered and own == (1 if buys else HIGHEST_PRICE)):
        return WALK
    if buys:
        return f"offer {max(1, own // 2)}" if not offered else f"offer {max(1, own - 1)}"
    return f"offer {min(HIGHEST_PRICE, own + 1)}"


def random_negotiator(heard: Sequence[str], prompt: str, rng: random.Random) -> str:
    """Negotiate: anything legal."""
    offer = [] if "last word" in prompt else [f"offer {rng.randint(1, HIGHEST_PRICE)}"]
    return rng.choice([*offer, WALK, *([] if "make an offer" in prompt else [ACCEPT])])


def _opened(heard: Sequence[str]) -> bool:
    """Whether this seat opened the game of Kuhn poker."""
    return bool(heard) and "you are alpha" in heard[0]


def numbers(prompt: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", prompt)]
