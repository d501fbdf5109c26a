"""The page and the picture about a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.app import curves, findings
from coordinator.app.curves import draw
from coordinator.app.progress import AgentFacts, Row, RunFacts, RunResult
from coordinator.app.rundir import Exit
from coordinator.app.summary import summary

FACTS = RunFacts(
    "guess",
    "A hint and a guess.",
    (AgentFacts("ann", ("left", "right"), "ann", "grpo"), AgentFacts("bob", ("bob",), "bob", "frozen")),
    "demo",
    20,
    64,
    Path("runs/guess"),
    7,
    "success",
    "opentinker run guess --seed 7",
    8,
)


def rows_of(rounds: int) -> list[Row]:
    found: list[Row] = []
    for round in range(1, rounds + 1):
        for agent in ("ann", "bob"):
            row = {
                "round": round,
                "agent": agent,
                "phase": "train",
                "reward_mean": round / 20,
                "rows": 64,
                "cut": 2,
                "entropy": 1.0,
            }
            found.append(
                row
                | {"measure/success": 0.5, "count/cut": 1, "count/strange": 1}
                | {"seconds/rollout": 3.0, "seconds/update": 1.0, "wait/update_end": 0.25 if agent == "ann" else 2e-4}
                | {"seconds/round": 5.0, "seconds/engine": 3.5, "seconds/scenario": 0.5, "seconds/coordination": 1.0}
            )
    held_out = {"agent": "ann", "phase": "evaluate", "evaluation": "held-out", "mode": "greedy", "value": 0.5}
    held_out |= {"cut": 3, "seconds/evaluate": 2.5}
    return [*found, {"round": 0, **held_out}, {"round": rounds, **held_out}]


def page(rows: list[Row], **odd: object) -> str:
    values = {"exit": Exit("finished", 0, "20 rounds"), "transcripts": ("ann says: | hi\n```", "bob says: no"), **odd}
    result = RunResult(
        changes=findings.changes(rows, "success"),
        files=(("metrics", Path("metrics.jsonl")),),
        seconds=125.0,
        warnings=findings.warnings(rows, 8),
        **values,  # type: ignore[arg-type]
    )
    return summary(FACTS, rows, result, curves="curves.png")


def test_the_page_says_what_ran_and_how_it_ended() -> None:
    text = page(rows_of(20))
    assert text.startswith("# guess\n\nA hint and a guess.\n\n**finished** (exit code 0) after 2:05: 20 rounds\n")
    assert "    opentinker run guess --seed 7\n" in text
    assert "Model `demo`, seed 7, 20 rounds of 64 episodes." in text
    assert "| ann | left, right | ann | grpo |" in text


@pytest.mark.parametrize(
    "line",
    [
        "| reward of ann | 0.15 | 0.78 | +0.62 | 1-5 → 11-20 |",
        "| held-out, greedy | 0.50 | 0.50 | +0.00 | 0 → 20 |",
        "| **all training rounds** | **100.00** | **5.00** | **100.0%** |",
        "| engine (the model) | 70.00 | 3.50 | 70.0% |",
        "| scenario code | 10.00 | 0.50 | 10.0% |",
        "| coordination | 20.00 | 1.00 | 20.0% |",
        "| **the whole run** | **125.00** | – | **100.0%** |",
        "| rollout | 60.00 | 3.00 | 48.0% |",
        "| update | 20.00 | 1.00 | 16.0% |",
        "| evaluate | 5.00 | – | 4.0% |",
        "| everything else | 40.00 | – | 32.0% |",
        "| update end | 250.0 | 0.2 |",
        "| cut | sequences whose last reply was cut off by a limit | 40 | 40 |",
        "| left out: cut | sequences that were cut off, and cut rows are ignored | 20 | 20 |",
        "| strange |  | 20 | 20 |",
        "| cut | sequences whose last reply was cut off by a limit | 6 |",
        "- ann: 3.1% of its episodes have an answer cut off by a limit; raise max_tokens or ask for shorter answers",
        "![Reward, headline measure and evaluations by round](curves.png)",
        "    ann says: | hi",
        "    ```",
        "| metrics | `metrics.jsonl` |",
    ],
)
def test_the_page_has(line: str) -> None:
    assert line in page(rows_of(20)).splitlines()


def test_a_run_that_failed_before_its_first_round_has_a_page_too() -> None:
    text = page([], exit=Exit("failed", 1, "the model\nis | gone"), transcripts=())
    assert "**failed** (exit code 1) after 2:05: the model is \\| gone" in text
    assert "nothing to compare" in text
    assert "## Time" not in text


VALUES = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.floats())
KEYS = st.sampled_from(
    ["round", "agent", "phase", "evaluation", "value", "reward_mean", "cut", "rows", "wait/x", "seconds/update"]
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.dictionaries(KEYS, VALUES), max_size=6))
def test_any_rows_make_a_page(rows: list[Row]) -> None:
    assert page(rows).startswith("# guess\n")


def test_the_picture_is_a_png_of_900_by_500() -> None:
    pytest.importorskip("matplotlib")
    picture = draw(rows_of(20), "success")
    assert picture is not None
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) == (900, 500)


def drawn(rows: list[Row]) -> Any:
    """The figure with everything on it, before it becomes a picture."""
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=curves.SIZE, layout="constrained")
    curves._panels(figure, rows, "success")
    return figure


def crowd(agents: int) -> list[Row]:
    """Seven evaluations in two modes, whose values differ from agent to agent."""
    names = [f"agent-{k}" for k in range(agents)]
    held = [
        {"agent": name, "phase": "evaluate", "evaluation": f"against-{k}", "mode": mode, "value": float(number)}
        for k in range(7)
        for mode in ("sampled", "greedy")
        for number, name in enumerate(names)
    ]
    rewards = [{"agent": name, "phase": "train", "reward_mean": 1.0} for name in names]
    return [{"round": round, **row} for round in (1, 2) for row in [*held, *rewards]]


def test_every_line_of_the_picture_looks_different() -> None:
    figure = drawn(crowd(3))
    for axes in (figure.axes[0], figure.axes[1]):
        named = [line for line in axes.lines if not line.get_label().startswith("_")]
        looks = {
            (each.get_color(), each.get_marker(), each.get_linestyle(), each.get_markerfacecolor()) for each in named
        }
        assert len(named) == len(looks)
    assert len(figure.axes[1].lines) == 7 * 2 * 3


def test_names_of_lines_never_lie_on_the_curves() -> None:
    few, many = drawn(crowd(1)), drawn(crowd(6))
    for figure in (few, many):
        figure.draw_without_rendering()
        frames = [axes.get_window_extent() for axes in figure.axes]
        assert len(figure.legends) == 2
        assert not any(each.get_window_extent().overlaps(frame) for each in figure.legends for frame in frames)
    assert many.get_figheight() > few.get_figheight()


def test_names_are_no_formulas_and_no_fonts_are_missed() -> None:
    pytest.importorskip("matplotlib")
    rows: list[Row] = [{"round": r, "agent": "$x_{$ 答", "reward_mean": 1.0, "measure/a$b$": 0.5} for r in (1, 2)]
    assert draw(rows, "a$b$") is not None


def test_without_numbers_there_is_no_picture() -> None:
    assert draw([{"round": 1, "agent": "ann", "reward_mean": None}]) is None


def test_the_page_says_what_overlapping_gained_and_cost() -> None:
    rows = rows_of(2)
    for number, row in enumerate(rows[:4]):
        row |= {"tokens_trained": 100 if number < 2 else 300, "update_seconds": 4.0, "overlap_seconds": 3.0}  # type: ignore[operator]
        row |= {"lag_mean": 1.0 if number < 2 else 2.0, "lag_max": 2, "clip_fraction": 0.1}  # type: ignore[operator]
        row |= {"truncated_fraction": 0.01, "count/stale": 1, "count/stale_tokens": 7}  # type: ignore[operator]
        rows[number] = row
    text = page(rows)
    lines = [line for line in text.partition("## Rollouts beside updates")[2].partition("##")[0].splitlines() if line]
    assert lines == [
        "|  | ann | bob |",
        "|---|---|---|",
        "| wall time waited at barriers | 5.0% | 0.0% |",
        "| update time beside rollouts | 75.0% of 8.00 s | 75.0% of 8.00 s |",
        "| age of trained tokens in updates: mean | 1.75 | 1.75 |",
        "| age of trained tokens in updates: largest | 2 | 2 |",
        "| ratios clipped | 10.0% | 10.0% |",
        "| ratios cut off at the cap | 1.0% | 1.0% |",
        "| sequences refused as too old (tokens) | 2 (14) | 2 (14) |",
    ]
    assert "Rollouts beside updates" not in page(rows_of(2))


def test_older_weights_are_no_disagreement_between_sampler_and_trainer() -> None:
    rows = [{"round": 1, "agent": "ann", "phase": "train", "logprob_gap_max": 0.4, "lag_max": lag} for lag in (0, 1)]
    assert [len(findings.warnings([row])) for row in rows] == [1, 0]
