"""Games with rules, as frozen values: usable alone, proved by `check_game`, and turned into scenarios by `scenarios.games.play`."""

from envs.auction import Auction
from envs.dilemma import Dilemma
from envs.game import Game
from envs.guess import Guess
from envs.kuhn import Kuhn
from envs.negotiate import Negotiate
from envs.nim import Nim

__all__ = ["Auction", "Dilemma", "Game", "Guess", "Kuhn", "Negotiate", "Nim"]
