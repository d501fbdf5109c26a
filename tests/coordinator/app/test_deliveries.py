"""Played episodes as bundles: they come out as they went in, and whatever is wrong with one fails that one and names its host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.app.cast import roles
from coordinator.app.config import ConfigError, resolve
from coordinator.app.deliveries import bundle_of, packed, unpacked
from coordinator.app.production import further_production, setup, terms
from scenarios import load_scenario
from tinker.models import DEMO
from tinker.protocol.episodes import Episode, Line, Recording, Trajectory
from tinker.protocol.to_host import Delivered, Enlisted
from tinker.protocol.values import (
    AgentName,
    BlobRef,
    Dealt,
    Ended,
    EpisodeId,
    ModelCard,
    PeerName,
    Phase,
    PolicyName,
    RunId,
    SeatName,
    pack_floats,
    pack_ids,
)
from tinker.runtime.bundles import check_name
from tinker.tokens import ChatTemplate, Tokenizer

RUN, GUESS = RunId("run-1"), load_scenario("guess")
IDS = tuple(EpisodeId(3, Phase.ROLLOUT, index) for index in (4, 5))
DEAL = Dealt(3, Phase.ROLLOUT, 2)


def episode(id: EpisodeId, text: str = "said") -> Episode:
    seat, agent = SeatName("hinter"), AgentName("hinter")
    tokens = Trajectory(
        seat, agent, PolicyName("p"), pack_ids([1, 2]), b"\0\1", pack_floats([0.0, -0.5]), (), 1.0, 1, 0, 0
    )
    lines = (Line(seat, "reply", text, 0, pack_ids([2])),)
    recording = Recording("r", id, "guess", 1, "7", "{}", ((seat, "policy"),), lines, Ended.FINISHED, ((seat, 0.5),))
    return Episode(id, 2, Ended.FINISHED, ((seat, 0.5),), (("m", 1.0),), (tokens,), recording)


def delivered(*ids: EpisodeId) -> Delivered:
    return Delivered(RUN, PeerName("ann"), DEAL, ids, BlobRef("b", "d", 1, "here", "/b", ""))


def test_episodes_come_out_as_they_went_in() -> None:
    episodes = [episode(id) for id in IDS]
    assert unpacked(delivered(*IDS), packed(episodes), GUESS) == episodes


def test_equal_episodes_have_one_name_that_belongs_to_their_run_and_phase() -> None:
    files = packed([episode(IDS[0])])
    name = bundle_of(RUN, DEAL, files)
    assert name == bundle_of(RUN, DEAL, packed([episode(IDS[0])]))
    assert name != bundle_of(RUN, DEAL, packed([episode(IDS[0], "other")]))
    assert check_name(name).startswith("run-1=@3-rollout-")


@pytest.mark.parametrize("data", [b"", b"\x90", b"no message at all"])
def test_what_is_no_episode_fails_that_episode_and_names_its_host(data: bytes) -> None:
    files = {**packed([episode(id) for id in IDS]), f"{IDS[1].index:08d}.episode": data}
    good, bad = unpacked(delivered(*IDS), files, GUESS)
    assert good == episode(IDS[0])
    assert (bad.episode, bad.ended, bad.trajectories) == (IDS[1], Ended.FAILED, ())
    assert "host ann delivered no episode 3/rollout/5" in bad.recording.reason


def test_a_missing_or_exchanged_episode_is_a_failed_one() -> None:
    (missing,) = unpacked(delivered(IDS[0]), {}, GUESS)
    assert "it is missing" in missing.recording.reason
    exchanged = {f"{IDS[0].index:08d}.episode": packed([episode(IDS[1])])[f"{IDS[1].index:08d}.episode"]}
    (other,) = unpacked(delivered(IDS[0]), exchanged, GUESS)
    assert (other.ended, other.episode) == (Ended.FAILED, IDS[0])


def test_an_episode_that_cannot_travel_goes_as_a_failed_one() -> None:
    (failed,) = unpacked(delivered(IDS[0]), packed([episode(IDS[0], "\ud800")]), GUESS)
    assert failed.ended is Ended.FAILED
    assert "cannot travel" in failed.recording.reason


def test_a_further_host_plays_with_what_the_learner_host_says() -> None:
    config = resolve(GUESS.defaults, {"scenario": "guess", "seed": 5, "params": {"secret_max": 9}})
    told = setup(config, roles(RUN, GUESS, config))
    card = ModelCard("m", "d", "t", 9, 512, (0,))
    enlisted = Enlisted(RUN, PeerName("host"), told, card, b"", "", "")
    template = ChatTemplate(Tokenizer.from_dir(DEMO))
    made = further_production(enlisted, GUESS, template, 8)
    assert (made.seed, made.params, made.context, made.concurrency) == (5, {"secret_max": 9}, 512, 8)
    assert {seat: cast.policy for seat, cast in made.cast.items()} == {
        "hinter": "run-1/hinter",
        "guesser": "run-1/guesser",
    }
    with pytest.raises(ConfigError, match="what this host cannot play"):
        further_production(replace(enlisted, setup=told.replace(b"secret_max", b"secret_min")), GUESS, template, 8)
    with pytest.raises(ConfigError, match="what this host cannot play"):
        further_production(replace(enlisted, setup=b"junk"), GUESS, template, 8)


def test_scenarios_that_play_otherwise_have_other_terms() -> None:
    same = {term.name: term.value for term in terms(GUESS)}
    changes = {"version": 2, "retries": 3, "learn_from_forfeits": not GUESS.learn_from_forfeits, "seats": ("a", "b")}
    for name, value in changes.items():
        other = {term.name: term.value for term in terms(replace(GUESS, **{name: value}))}  # type: ignore[arg-type]
        assert [key for key in same if same[key] != other[key]] == [name]
