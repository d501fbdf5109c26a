"""The scenarios that come with OpenTinker: played by scripts, by forfeiters, from recordings, and as the demo model reads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from scenario_fakes import lines, play, scripted

from agents.players.player import Player
from agents.players.scripted import ScriptedPlayer
from coordinator.app.config import resolve
from envs.strategies import perfect_nim, random_kuhn, random_nim
from scenarios import Scenario, ScriptedFunction, load_scenario, read_recordings, replay
from scenarios.library import library
from tinker.protocol.episodes import Episode
from tinker.protocol.values import Ended, SeatName

LIBRARY = library()
RECORDINGS = Path(__file__).parent / "recordings"


def seated(played: Scenario, seed: int, **others: ScriptedFunction) -> dict[SeatName, Player]:
    """The baselines, or others in their place."""
    scripts = {**played.baselines, **others}
    return {SeatName(seat): ScriptedPlayer(scripts[seat], random.Random(f"{seed} {seat}")) for seat in played.seats}


async def rate(
    name: str, measure: str, episodes: int = 50, params: dict[str, Any] | None = None, **others: ScriptedFunction
) -> float:
    """The mean of a measure."""
    played = LIBRARY[name]
    found = [
        await play(played, seated(played, seed, **others), seed=seed, **(params or {})) for seed in range(episodes)
    ]
    return sum(dict(episode.measures)[measure] for episode in found) / episodes


def test_the_library_is_sorted_and_found_by_name() -> None:
    assert list(LIBRARY) == sorted(LIBRARY)
    assert {"colours", "dilemma", "guess", "kuhn", "nim"} <= set(LIBRARY)
    assert load_scenario("nim") is LIBRARY["nim"]


@pytest.mark.parametrize("name", LIBRARY)
async def test_baselines_play_every_scenario_to_its_end(name: str) -> None:
    played = LIBRARY[name]
    episode = await play(played, seated(played, 0))
    assert episode.ended is Ended.FINISHED
    assert played.headline in dict(episode.measures) or name == "nim"


@pytest.mark.parametrize("name", LIBRARY)
def test_defaults_are_a_valid_configuration(name: str) -> None:
    config = resolve({"scenario": name}, LIBRARY[name].defaults)
    groups = {"kuhn": 12, "colours": 4}.get(name, 8)
    tokens = 8 if name == "colours" else 6
    assert (config.groups, config.group_size, config.learning.max_tokens) == (groups, 8, tokens)


@pytest.mark.parametrize(
    ("name", "evaluation"), [(name, each.name) for name, played in LIBRARY.items() for each in played.evaluations]
)
async def test_every_evaluation_can_be_played_and_measures_what_it_says(name: str, evaluation: str) -> None:
    played = LIBRARY[name]
    (chosen,) = (each for each in played.evaluations if each.name == evaluation)
    episode = await play(played, seated(played, 1, **chosen.opponents), seed=1, **chosen.params)
    assert chosen.measure in dict(episode.measures)


async def test_binary_search_and_true_hints_always_succeed_at_guess() -> None:
    assert await rate("guess", "success") == 1.0
    assert await rate("guess", "success", params={"secret_max": 15, "tries": 4}) == 1.0


@pytest.mark.parametrize(("seat", "other"), [("alpha", "beta"), ("beta", "alpha")])
async def test_the_perfect_nim_player_wins_from_every_winnable_pile(seat: str, other: str) -> None:
    params: dict[str, Any] = {"first": seat, "winnable": True}
    opponents = {other: random_nim}
    assert await rate("nim", f"win_{seat}", params=params, **opponents) == 1.0
    assert await rate("nim", f"win_{seat}", params=params) == 1.0


async def test_only_moves_that_keep_a_win_are_optimal() -> None:
    def take_one(heard: object, prompt: str, rng: random.Random) -> str:
        return "take 1"

    params: dict[str, Any] = {"pile_min": 6, "pile_max": 6, "first": "alpha"}
    # 6 -1-> 5 -1-> 4 -1-> 3 -1-> 2 -1-> 1 -1-> 0: of the moves from 6, 5, 3, 2, 1 those from 5 and 1 were right
    assert await rate("nim", "optimal", 1, params, alpha=take_one, beta=take_one) == 2 / 5
    assert await rate("nim", "optimal", params={"winnable": True}, alpha=perfect_nim, beta=perfect_nim) == 1.0


@pytest.mark.parametrize("seat", ["alpha", "beta"])
async def test_nobody_wins_at_kuhn_from_the_equilibrium(seat: str) -> None:
    """Its value is -1/18 chips for alpha; the standard error of 1,000 games is 0.04."""
    value = {"alpha": -1 / 18, "beta": 1 / 18}[seat]
    assert await rate("kuhn", f"chips_{seat}", 1000, **{seat: random_kuhn}) < value + 0.1
    assert abs(await rate("kuhn", f"chips_{seat}", 1000) - value) < 0.15


async def test_tit_for_tat_cooperates_with_itself() -> None:
    assert await rate("dilemma", "cooperation") == 1.0


@pytest.mark.parametrize(("payoff", "scores"), [("own", (1.0, 0.0)), ("shared", (0.5, 0.5))])
async def test_the_payoff_decides_what_exploiting_earns(payoff: str, scores: tuple[float, float]) -> None:
    episode = await play(LIBRARY["dilemma"], scripted(alpha=lines("defect"), beta=lines("cooperate")), payoff=payoff)
    assert tuple(score for _, score in episode.scores) == scores


@pytest.mark.parametrize(
    ("name", "offender", "other"),
    [("guess", "guesser", "hinter"), ("guess", "hinter", "guesser"), ("nim", "alpha", "beta"), ("nim", "beta", "alpha"),
     ("dilemma", "alpha", "beta"), ("dilemma", "beta", "alpha"), ("kuhn", "alpha", "beta"), ("kuhn", "beta", "alpha")],
)  # fmt: skip
async def test_an_illegal_answer_costs_its_seat_and_ends_the_episode(name: str, offender: str, other: str) -> None:
    played = LIBRARY[name]
    for seed in range(20):
        episode: Episode = await play(played, seated(played, seed, **{offender: lines("i pass")}), seed=seed)
        if any(line.seat == offender and line.kind == "ask" for line in episode.recording.lines):
            assert (episode.ended, dict(episode.scores)) == (
                Ended.FORFEITED,
                {offender: played.forfeit.own, other: 0.0},
            )
            return
    raise AssertionError(f"{offender} was never asked")


@pytest.mark.parametrize(
    ("answer", "measures"),
    [("It is Red.", (1.0, 1.0)), ("blue", (1.0, 0.0)), ("red or blue", (0.0, 0.0)), ("no idea", (0.0, 0.0))],
)
async def test_colours_pays_for_naming_the_right_colour_and_no_other(
    answer: str, measures: tuple[float, float]
) -> None:
    played = LIBRARY["colours"]
    for seed in range(30):
        episode = await play(played, seated(played, seed, listener=lines(answer)), seed=seed)
        if any("colour is red" in line.text for line in episode.recording.lines if line.kind == "ask"):
            assert tuple(dict(episode.measures)[name] for name in ("named", "right")) == measures
            assert dict(episode.scores) == dict.fromkeys(played.seats, measures[1])
            return
    raise AssertionError("no episode was about red")


async def test_episodes_of_one_group_share_their_start() -> None:
    played = LIBRARY["nim"]
    starts = set()
    for index in range(8):
        episode = await play(played, seated(played, index, alpha=random_nim, beta=random_nim), seed=5, index=index)
        first = next(line for line in episode.recording.lines if line.kind == "ask")
        starts.add((first.seat, first.text))
    assert len(starts) == 1


@pytest.mark.parametrize("name", LIBRARY)
async def test_recorded_episodes_take_the_same_course_under_the_rules_of_today(name: str) -> None:
    recordings = read_recordings(RECORDINGS / f"{name}.jsonl")
    assert {recording.ended for recording in recordings} == {Ended.FINISHED, Ended.FORFEITED}
    for recording in recordings:
        await replay(recording, LIBRARY[name])
