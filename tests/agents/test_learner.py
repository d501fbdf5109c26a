"""The learner: weights, masks, refusals, and a report in which nothing is missing (field cases G4, H2, H3, H5, H9, I1, I2, P6, P7)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.learner import Batch, Learner, LearnerOptions
from agents.report import Fate
from tinker.algorithms.grpo import Grpo
from tinker.algorithms.reinforce import Reinforce
from tinker.protocol.batches import Row
from tinker.protocol.episodes import Episode, Recording, Span, Trajectory
from tinker.protocol.values import AgentName, Ended, EpisodeId, Phase, PolicyName, SeatName, pack_floats, pack_ids

X = AgentName("x")


def trajectory(
    pattern: str = "..aa.a",
    *,
    agent: str = "x",
    seat: str = "left",
    version: int = 3,
    missing: Sequence[int] = (),
    **rest: object,
) -> Trajectory:
    """`pattern`: one letter a token: `.` prompt, `a` accepted and sampled, `r` sampled but masked. Ids count up from 100."""
    logprobs = [-0.5 if letter in "ar" else 0.0 for letter in pattern]
    mask = [letter == "a" for letter in pattern]
    for at in missing:
        logprobs[at], mask[at] = math.nan, False
    made = Trajectory(
        seat=SeatName(seat),
        agent=AgentName(agent),
        policy=PolicyName(agent),
        ids=pack_ids(range(100, 100 + len(pattern))),
        mask=bytes(mask),
        logprobs=pack_floats(logprobs),
        spans=(Span(version, 0, len(pattern)),),
        temperature=1.0,
        sampled=sum(letter in "ar" for letter in pattern),
        retries=0,
        forfeits=0,
    )
    return replace(made, **rest)  # type: ignore[arg-type]


def episode(
    index: int, score: float | None, *trajectories: Trajectory, group: int = 0, ended: Ended = Ended.FINISHED
) -> Episode:
    """An episode in which every seat gets the same score."""
    found = trajectories or (trajectory(),)
    scores = tuple((one.seat, score) for one in found if score is not None)
    number = EpisodeId(1, Phase.ROLLOUT, index)
    recording = Recording("run", number, "s", 1, "0", "{}", (), (), ended, scores)
    return Episode(number, group, ended, scores, (), found, recording)


def learn(episodes: Sequence[Episode], version: int = 3, **options: object) -> Batch:
    return Learner(X, Grpo("none"), LearnerOptions(**options)).batch(episodes, version)  # type: ignore[arg-type]


def same(one: Row, other: Row) -> bool:
    arrays = ("ids", "mask", "logprobs", "advantages", "weights")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def test_a_row_holds_the_sequence_with_credit_and_weight_on_its_own_tokens_only() -> None:
    batch = learn([episode(0, 1.0), episode(1, 0.0)])
    row = batch.rows[0]
    mask = [0, 0, 1, 1, 0, 1]
    assert row.ids.tolist() == list(range(100, 106))
    assert row.mask.tolist() == [bool(on) for on in mask]
    assert row.logprobs.tolist() == [-0.5 * on for on in mask]
    assert row.advantages.tolist() == [0.5 * on for on in mask]
    assert row.weights.tolist() == [0.5 * on for on in mask]
    assert (row.ids.dtype, row.mask.dtype, row.weights.dtype) == (np.int32, np.bool_, np.float32)


def test_weights_count_the_sequences_that_were_left_out_for_being_equal() -> None:
    batch = learn([episode(0, 1.0), episode(1, 0.0), episode(2, 5.0, group=1), episode(3, 5.0, group=1)])
    assert [row.weights.max() for row in batch.rows] == [0.25, 0.25]
    assert (batch.report.dropped_zero, batch.report.no_signal, batch.report.groups) == (2, 1, 2)


def test_equal_sequences_stay_where_the_loss_has_other_terms() -> None:
    batch = learn([episode(0, 1.0), episode(1, 1.0)], drop_zero=False)
    assert [row.advantages.any() for row in batch.rows] == [False, False]
    assert [row.weights.sum() for row in batch.rows] == [1.5, 1.5]
    assert batch.report.reason == ""


def test_weights_may_count_tokens_instead() -> None:
    batch = learn([episode(0, 1.0, trajectory("..a")), episode(1, 0.0, trajectory("..aaa"))], denominator="tokens")
    assert sum(row.weights.sum() for row in batch.rows) == pytest.approx(1.0)
    assert batch.rows[0].weights.max() == 0.25


def test_g4_rows_hold_only_the_own_agent_s_sequences() -> None:
    episodes = [
        episode(at, float(at), trajectory("..aa"), trajectory("..aaa", agent="y", seat="right")) for at in range(2)
    ]
    assert [row.mask.sum() for row in learn(episodes).rows] == [2, 2]
    assert [row.mask.sum() for row in Learner(AgentName("y"), Grpo()).batch(episodes, 3).rows] == [3, 3]


def test_h2_two_seats_of_one_agent_are_compared_apart() -> None:
    def both(index: int, left: float, right: float) -> Episode:
        made = episode(index, 0.0, trajectory(), trajectory(seat="right"))
        return replace(made, scores=((SeatName("left"), left), (SeatName("right"), right)))

    batch = learn([both(0, 0, 10), both(1, 1, 20)])
    assert [float(row.advantages.max() or row.advantages.min()) for row in batch.rows] == [-0.5, -5.0, 0.5, 5.0]


@pytest.mark.parametrize("ended", [Ended.FAILED, Ended.DROPPED])
def test_failed_episodes_are_never_trained_on(ended: Ended) -> None:
    batch = learn([episode(0, 1.0), episode(1, 0.0), episode(2, 9.0, ended=ended)])
    assert (len(batch.rows), batch.report.failed, batch.report.episodes) == (2, 1, 3)
    assert batch.rows[0].advantages.max() == 0.5


def test_forfeited_episodes_are_trained_on() -> None:
    assert len(learn([episode(0, 1.0), episode(1, -1.0, ended=Ended.FORFEITED)]).rows) == 2


def test_evaluations_and_repeated_episodes_do_not_count() -> None:
    one, two = episode(0, 1.0), episode(1, 0.0)
    evaluated = replace(episode(2, 9.0), evaluation="held-out")
    batch = learn([one, two, one, evaluated])
    assert (len(batch.rows), batch.report.duplicates, batch.report.episodes) == (2, 1, 2)


def test_lag_counts_updates_and_not_numbers() -> None:
    """Version 3 was followed by 7 and 9: numbers that were asked for and never published do not make tokens older."""
    played = [episode(0, 1.0), episode(1, 0.0)]
    learner = Learner(X, Grpo("none"), LearnerOptions(max_lag=2))
    batch = learner.batch(played, 9, published=(0, 3, 7, 9))
    assert (len(batch.rows), batch.report.lag_mean, batch.report.lag_max) == (2, 2.0, 2)
    assert learner.batch(played, 9, published=(0, 3, 5, 7, 9)).report.stale == 2
    assert learner.batch(played, 9, published=(0, 7, 9)).report.stale == 2  # nobody published it


def test_the_report_says_how_old_trained_tokens_are_and_how_many_were_too_old() -> None:
    mixed = trajectory(".aa.aa", spans=(Span(2, 0, 3), Span(3, 3, 6)))
    young, old = trajectory(".aa"), trajectory(".aaa", version=0)
    batch = learn([episode(0, 1.0, mixed), episode(1, 0.0, young), episode(2, 5.0, old)], max_lag=1)
    assert (len(batch.rows), batch.report.stale, batch.report.stale_tokens) == (2, 1, 3)
    assert (batch.report.lag_mean, batch.report.lag_max) == (pytest.approx(2 / 6), 1)
    nothing = learn([episode(2, 5.0, old)], max_lag=1)
    assert nothing.report.lag_mean is None
    assert "1 of 1 rows were sampled by a version outside the bound" in nothing.report.reason


@pytest.mark.parametrize(("lag", "version", "stale"), [(0, 3, 0), (0, 4, 2), (1, 4, 0), (1, 5, 2), (1, 2, 2)])
def test_sequences_of_versions_outside_the_bound_are_refused_and_counted(lag: int, version: int, stale: int) -> None:
    batch = learn([episode(0, 1.0), episode(1, 0.0)], version=version, max_lag=lag)
    assert (batch.report.stale, len(batch.rows)) == (stale, 2 - stale)
    if stale:
        assert "2 of 2 rows were sampled by a version outside the bound" in batch.report.reason


def test_one_stale_span_makes_the_whole_sequence_stale() -> None:
    mixed = trajectory(spans=(Span(2, 2, 4), Span(3, 5, 6)))
    assert learn([episode(0, 1.0, mixed), episode(1, 0.0), episode(2, 1.0)]).report.fates == {
        Fate.STALE: 1,
        Fate.TRAINED: 2,
    }


def test_h5_a_sequence_without_a_score_is_left_out_and_counted() -> None:
    batch = learn([episode(0, 1.0), episode(1, None), episode(2, 0.0), episode(3, math.nan)])
    assert (batch.report.bad_scores, len(batch.rows)) == (2, 2)
    assert batch.rows[0].weights.max() == 0.5


def test_h9_tokens_without_logprobs_are_masked_and_counted() -> None:
    batch = learn([episode(0, 1.0, trajectory("..aaa", missing=[3])), episode(1, 0.0)])
    assert batch.report.missing_logprobs == 1
    assert batch.rows[0].mask.tolist() == [False, False, True, False, True]
    assert np.isfinite(batch.rows[0].logprobs).all()


def test_h9_a_trajectory_that_marks_a_token_without_a_logprob_is_corrected() -> None:
    wrong = replace(trajectory("..aa"), logprobs=pack_floats([0, 0, -0.5, -math.inf]))
    batch = learn([episode(0, 1.0, wrong), episode(1, 0.0)])
    assert batch.rows[0].mask.tolist() == [False, False, True, False]
    assert np.isfinite(batch.rows[0].logprobs).all()


def test_h11_a_discount_fades_over_own_tokens_only() -> None:
    batch = learn([episode(0, 2.0, trajectory("a..aa..")), episode(1, 0.0, trajectory("a..aa.."))], discount=0.81)
    assert batch.rows[0].advantages == pytest.approx([0.6561, 0, 0, 0.81, 1, 0, 0])


def test_i1_a_row_cap_counts_what_it_cuts() -> None:
    turns = "aaaaaa....aaaaaa....aaaaaa"
    episodes = [episode(0, 1.0, trajectory(turns)), episode(1, 0.0, trajectory(turns))]
    whole = learn(episodes, max_row=64)
    assert [row.mask.sum() for row in whole.rows] == [18, 18]
    assert (whole.report.capped_rows, whole.report.capped_tokens) == (0, 0)
    capped = learn(episodes, max_row=20)
    assert [(row.ids.size, row.mask.sum()) for row in capped.rows] == [(20, 12), (20, 12)]
    assert (capped.report.capped_rows, capped.report.capped_tokens) == (2, 12)
    assert (capped.report.trained_tokens, capped.report.masked_tokens) == (24, 12)


def test_i2_cut_answers_are_counted_by_their_limit_and_trained_on_unless_ignored() -> None:
    episodes = [episode(0, 1.0, trajectory(cut="length")), episode(1, 0.0, trajectory(cut="context")), episode(2, 0.0)]
    assert learn(episodes).report.cut == {"length": 1, "context": 1}
    assert len(learn(episodes).rows) == 3
    ignored = learn(episodes, ignore_cut=True)
    assert len(ignored.rows) == 1
    assert ignored.report.fates[Fate.CUT] == 2
    assert ignored.report.trained_tokens == 3


def test_retries_and_forfeits_are_counted() -> None:
    report = learn(
        [episode(0, 1.0, trajectory("..rraa", retries=1)), episode(1, 0.0, trajectory("..rr", forfeits=1))]
    ).report
    assert (report.retries, report.forfeits, report.masked_tokens, report.trained_tokens) == (1, 1, 4, 2)
    assert report.fates == {Fate.TRAINED: 1, Fate.REJECTED: 1}


def test_p6_the_mean_score_says_over_how_many() -> None:
    report = learn([episode(0, 1.0), episode(1, None), episode(2, 3.0)]).report
    assert (report.score_mean, report.score_count) == (2.0, 2)
    assert learn([episode(0, None)]).report.score_mean is None


@pytest.mark.parametrize(
    ("episodes", "options", "reason"),
    [
        (
            [episode(0, 1.0), episode(1, 1.0)],
            {},
            "2 of 2 rows have an advantage of zero (equal scores in their group)",
        ),
        (
            [episode(0, 1.0, trajectory("..a", missing=[2]))],
            {},
            "1 of 1 rows have no log-probabilities from the engine",
        ),
        (
            [episode(0, 1.0, trajectory(cut="length"))],
            {"ignore_cut": True},
            "1 of 1 rows were cut off, and cut rows are ignored",
        ),
        ([episode(0, 1.0, ended=Ended.FAILED)], {}, "1 of 1 episodes failed or were dropped"),
        ([episode(0, 1.0), episode(1, 0.0)], {"frozen": True}, "agent x is frozen"),
        ([episode(0, 1.0, trajectory(".."))], {}, "1 of 1 rows hold no sampled token"),
        ([episode(0, 1.0, trajectory("..r"))], {}, "1 of 1 rows hold no reply that parsed"),
        ([episode(0, None)], {}, "1 of 1 rows have no usable score (None, NaN or infinite)"),
        (
            [episode(0, 1.0, trajectory("...a"))],
            {"max_row": 2},
            "1 of 1 rows have all their answers beyond the row cap",
        ),
        ([episode(0, 1.0, trajectory(agent="y"))], {}, "the agent sat at no table in 1 episodes"),
        ([], {}, "no episode was played"),
        (
            [episode(0, 1.0), episode(1, 1.0, trajectory("..r")), episode(2, 1.0, ended=Ended.FAILED)],
            {},
            "1 of 3 episodes failed or were dropped, 1 of 2 rows hold no reply that parsed, 1 of 2 rows have an advantage of "
            "zero (equal scores in their group)",
        ),
    ],
)
def test_p7_an_empty_batch_says_the_reasons_that_apply(
    episodes: list[Episode], options: dict[str, object], reason: str
) -> None:
    batch = learn(episodes, **options)
    assert batch.rows == []
    assert batch.report.reason == f"nothing to train on: {reason}"


def test_a_frozen_agent_s_baseline_does_not_move() -> None:
    learner = Learner(X, Reinforce(), LearnerOptions(frozen=True))
    learner.batch([episode(0, 1.0)], 3)
    assert learner.state() == {"algorithm": "reinforce", "state": {"baselines": []}}


def test_a_restored_learner_goes_on_with_its_baselines() -> None:
    first, second = Learner(X, Reinforce()), Learner(X, Reinforce())
    first.batch([episode(0, 1.0)], 3)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.batch([episode(1, -1.0)], 3).rows[0].advantages.min() == pytest.approx(-1.05)


def test_the_state_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="learns with grpo but its saved state is reinforce's"):
        Learner(X, Grpo()).restore(Learner(X, Reinforce()).state())


def test_greedy_sequences_are_scored_at_temperature_one() -> None:
    batch = learn([episode(0, 1.0, trajectory(temperature=0.0)), episode(1, 0.0, trajectory(temperature=0.5))])
    assert [row.temperature for row in batch.rows] == [1.0, 0.5]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, None]), max_size=8), st.randoms())
def test_the_order_in_which_episodes_arrive_changes_nothing(scores: list[float | None], rng: random.Random) -> None:
    episodes = [episode(at, score, group=at // 3) for at, score in enumerate(scores)]
    mixed = list(episodes)
    rng.shuffle(mixed)
    for algorithm in (Grpo("batch"), Reinforce()):
        state = algorithm.state()
        expected = Learner(X, algorithm).batch(episodes, 3)
        algorithm.restore(state)
        found = Learner(X, algorithm).batch(mixed, 3)
        assert found.report == expected.report
        assert all(same(one, other) for one, other in zip(found.rows, expected.rows, strict=True))


PATTERNS = st.text(st.sampled_from(".ar"), min_size=1, max_size=12)


@given(
    st.lists(st.tuples(PATTERNS, st.floats(-5, 5) | st.none()), max_size=8),
    st.integers(0, 12),
    st.sampled_from(["sequences", "tokens"]),
)
def test_every_sampled_token_is_trained_or_counted_as_masked(
    plays: list[tuple[str, float | None]], cap: int, denominator: str
) -> None:
    episodes = [episode(at, score, trajectory(pattern)) for at, (pattern, score) in enumerate(plays)]
    batch = learn(episodes, max_row=cap, denominator=denominator)
    report = batch.report
    assert report.trained_tokens + report.masked_tokens == sum(one.trajectories[0].sampled for one in episodes)
    assert sum(report.fates.values()) == report.sequences == len(plays)
    assert bool(report.reason) == (not batch.rows)
    for row in batch.rows:
        assert row.mask.any()
        assert (
            not row.weights[~row.mask].any()
            and not row.advantages[~row.mask].any()
            and not row.logprobs[~row.mask].any()
        )
