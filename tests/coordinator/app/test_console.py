"""What a run shows on a terminal, in a pipe, and at its end."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from coordinator.app import screen
from coordinator.app.console import Lines, LiveView, watching
from coordinator.app.progress import ARRIVED, AgentFacts, Both, Change, Progress, Row, RunFacts, RunResult, Silent
from coordinator.app.rundir import Exit
from coordinator.app.screen import Picture
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase

NAMES = ("hinter", "guesser")
RESULT = RunResult(
    Exit("finished", 0, "60 rounds"),
    (Change("success", 0.125, 0.75, "1-5", "51-60"),),
    ("hinter says: it is \x1b[31mlarge", "\n".join(f"line {k}" for k in range(40))),
    (
        (
            "metrics",
            Path("runs/a-directory-whose-name-is-longer-than-the-terminal-is-wide/and-more-of-it/metrics.jsonl"),
        ),
    ),
    92.0,
    ("hinter: 2% of its episodes were cut",),
)


class Hands:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def facts(names: Sequence[str] = NAMES) -> RunFacts:
    agents = tuple(AgentFacts(name, (name,), name, "grpo") for name in names)
    return RunFacts("guess", "A hint and a guess. " * 9, agents, "demo", 60, 64, Path("runs/guess"), 7, "success")


def trained(round: int, names: Sequence[str] = NAMES) -> list[Row]:
    seconds = {"seconds/rollout": 1.1, "seconds/update": 0.9, "seconds/coordination": 0.1}
    return [
        {"round": round, "agent": name, "phase": "train", "reward_mean": 0.41, "version": round, "entropy": 1.2}
        | {"tokens_per_second": 5100.4, "measure/success": 0.52, "grad_norm": 0.3}
        | seconds
        for name in names
    ]


def evaluated(round: int, value: float) -> list[Row]:
    return [
        {"round": round, "agent": name, "phase": "evaluate", "evaluation": "held-out", "mode": "greedy", "value": value}
        for name in NAMES
    ]


def lines(now: Hands | None = None) -> tuple[Lines, io.StringIO]:
    file = io.StringIO()
    return Lines(Console(file=file, width=80), now or Hands()), file


def shown(picture: Picture, now: float, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(screen.draw(picture, now, width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_round_is_one_line_in_a_pipe() -> None:
    now = Hands()
    watcher, file = lines(now)
    watcher.started(facts())
    now.at = 24.0
    watcher.rows(trained(12))
    assert file.getvalue().splitlines()[-1] == (
        "round 12/60 rollout 1.1 s update 0.90 s | success 0.52 | hinter +0.41 v12 | guesser +0.41 v12"
        " | 5,100 tok/s | coordination 5.0% | left 1:36"
    )


def test_an_evaluation_a_note_and_a_shut_barrier_are_a_line_each() -> None:
    watcher, file = lines()
    watcher.started(facts())
    before = len(file.getvalue().splitlines())
    watcher.rows(evaluated(10, 0.5))
    watcher.note("host h2 [left]\x1b[2J")
    watcher.missing(3, Phase.UPDATE, Edge.END, ("hinter",), ("guesser",))
    assert file.getvalue().splitlines()[before:] == [
        "round 10/60 evaluation | held-out, greedy 0.50",
        "note: host h2 [left]�[2J",
        "waiting at update end of round 3 for guesser (hinter arrived)",
    ]


def test_the_report_has_changes_warnings_episodes_and_whole_paths() -> None:
    watcher, file = lines()
    watcher.started(facts())
    watcher.finished(RESULT)
    text = file.getvalue()
    assert "finished after 1:32: 60 rounds" in text
    assert "success     0.12    0.75    +0.62   1-5 → 51-60" in text
    assert "warning: hinter: 2%" in text
    assert "it is �[31mlarge" in text
    assert "  line 21\n  … 16 more lines in the recording\n  line 38\n  line 39\n" in text
    assert str(RESULT.files[0][1]) in text


def test_a_reader_who_leaves_does_not_end_the_run() -> None:
    code = """
import sys
from coordinator.app.console import watching
sys.stdin.read()
with watching() as watcher:
    watcher.note("one")
    watcher.note("two")
sys.exit(7)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        child.stdout.close()
        child.stdin.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (7, b"")


def test_the_view_says_where_the_run_is_and_what_is_left() -> None:
    picture = Picture(facts=facts())
    picture = screen.opened(picture, 1, Phase.ROLLOUT, Edge.START, (), 0.0)
    picture = screen.noted(picture, trained(1))
    picture = screen.opened(picture, 2, Phase.ROLLOUT, Edge.START, (), 2.0)
    text = "\n".join(shown(picture, 3.0))
    assert "round 2/60 · 0:03 gone · 2:57 left" in text
    assert "rollout  0:01" in text
    assert "agent    played with  reward  so far" in text
    assert "hinter            v1   +0.41  ▄          0.52     1.20       0.30" in text
    assert "last round: 5,100 tok/s · rollout 1.1 s · update 0.90 s · coordination 5.0%" in text


def test_the_view_names_who_waits_for_whom() -> None:
    picture = Picture(facts=facts())
    waits = (Wait("hinter", 0.4, "guesser"), Wait("guesser", 0.0, ""))
    picture = screen.opened(picture, 1, Phase.UPDATE, Edge.END, waits, 1.0)
    picture = screen.opened(picture, 2, Phase.ROLLOUT, Edge.START, (), 2.0)
    assert "longest wait: hinter 0.40 s for guesser at update end of round 1" in shown(picture, 2.0)


def test_while_episodes_are_played_everybody_waits_for_them() -> None:
    picture = screen.opened(Picture(facts=facts()), 3, Phase.ROLLOUT, Edge.START, (), 0.0)
    picture = replace(picture, played=(9, 64))
    assert "hinter, guesser wait at rollout end of round 3 for 55 episodes" in shown(picture, 1.0)


def test_an_agent_whose_update_is_done_waits_for_the_others() -> None:
    picture = screen.opened(Picture(facts=facts()), 3, Phase.UPDATE, Edge.START, (), 0.0)
    one = replace(picture, busy={"hinter": ARRIVED, "guesser": "publish"})
    assert "hinter waits at update end of round 3 for guesser" in shown(one, 1.0)
    assert "nobody waits" in shown(replace(picture, busy={"hinter": ARRIVED, "guesser": ARRIVED}), 1.0)


def test_a_shut_barrier_is_shown_until_it_opens() -> None:
    watcher = LiveView(Console(file=io.StringIO(), width=80), Hands())
    watcher.started(facts())
    watcher.missing(1, Phase.UPDATE, Edge.END, ("hinter",), ("guesser",))
    shut = shown(watcher._picture, 1.0)
    watcher.opened(1, Phase.UPDATE, Edge.END, ())
    open_again = shown(watcher._picture, 1.0)
    watcher.close()
    assert "hinter waits at update end of round 1 for guesser" in shut
    assert "nobody waits" in open_again


@pytest.mark.parametrize("count", [1, 2, 6, 40])
@pytest.mark.parametrize("width", [80, 140])
def test_the_view_stays_small(count: int, width: int) -> None:
    names = [f"an-agent-with-a-name-{k}" for k in range(count)]
    picture = Picture(facts=facts(names))
    for round in range(1, 50):
        picture = screen.noted(picture, trained(round, names))
    many = [{**row, "evaluation": f"against-the-player-{k}"} for k in range(9) for row in evaluated(0, 0.1)]
    picture = screen.noted(picture, many + evaluated(0, 0.1) + evaluated(40, 0.9))
    text = shown(picture, 1e5, width)
    assert len(text) < 18
    assert max(map(len, text)) <= width


def test_noise_of_a_tenth_is_not_drawn_as_a_collapse() -> None:
    picture = Picture(facts=facts())
    for round, reward in enumerate((0.9, 0.8, 0.9), start=1):
        picture = screen.noted(picture, [{**row, "reward_mean": reward} for row in trained(round)])
    assert any("▅▃▅" in line for line in shown(picture, 1.0))


def test_sparklines_of_all_agents_have_one_scale() -> None:
    picture = Picture(facts=facts())
    for round, rewards in enumerate(((0.0, 0.0), (8.0, 1.0)), start=1):
        rows = [{**row, "reward_mean": each} for row, each in zip(trained(round), rewards, strict=True)]
        picture = screen.noted(picture, rows)
    text = "\n".join(shown(picture, 1.0))
    assert "▁▇" in text
    assert "▁▁" in text


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, ["evaluation: against-player-0 0.50 · against-player-1 0.50", " " * 12 + "against-player-2 0.50"]),
        (
            9,
            [
                "evaluation: against-player-0 0.50 · against-player-1 0.50",
                " " * 12 + "against-player-2 0.50 · against-player-3 0.50 · and 5 more",
            ],
        ),
    ],
)
def test_evaluations_that_do_not_fit_go_on_in_a_second_line(count: int, expected: list[str]) -> None:
    rows = [
        {"round": 0, "agent": "hinter", "phase": "evaluate", "evaluation": f"against-player-{k}", "value": 0.5}
        for k in range(count)
    ]
    assert shown(screen.noted(Picture(facts=facts()), rows), 1.0, 80)[-2:] == expected


REFUSED = RunResult(
    Exit("refused", 1, "the coordinator refuses this run because it has no free place, " * 3), (), (), (), 3.0
)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("admitted", [True, False])
def test_why_a_run_failed_is_said_once_and_in_one_line(live: bool, admitted: bool) -> None:
    file = io.StringIO()
    with watching(Console(file=file, width=80, force_terminal=live), live=live) as watcher:
        if admitted:
            watcher.started(facts())
        watcher.finished(REFUSED)
    (line,) = [each for each in file.getvalue().splitlines() if "refused" in each]
    assert f"refused after 0:03: {REFUSED.exit.detail}" in line


def test_of_a_crash_the_first_line_says_what_was_raised() -> None:
    watcher, file = lines()
    detail = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: two is odd\n'
    watcher.finished(RunResult(Exit("crashed", 1, detail), (), (), (), 3.0))
    assert file.getvalue().splitlines()[1:] == [
        "crashed after 0:03: ValueError: two is odd",
        "  Traceback (most recent call last):",
        '    File "a.py", line 1',
    ]


def test_without_a_terminal_there_are_lines_and_with_one_a_view() -> None:
    with watching(Console(file=io.StringIO())) as watcher:
        assert isinstance(watcher, Lines)
    with watching(Console(file=io.StringIO(), force_terminal=True), live=True) as watcher:
        assert isinstance(watcher, LiveView)


def test_the_cursor_is_given_back_when_the_run_crashes() -> None:
    file = io.StringIO()
    with pytest.raises(ZeroDivisionError), watching(Console(file=file, force_terminal=True), live=True) as watcher:
        watcher.started(facts())
        raise ZeroDivisionError
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


VALUES = st.one_of(st.none(), st.booleans(), st.text(max_size=5), st.integers(), st.floats(), st.just(10**400))
KEYS = st.sampled_from(
    ("round", "agent", "phase", "evaluation", "mode", "value", "reward_mean", "reward_std", "version", "entropy", "cut")
) | st.sampled_from(
    ("grad_norm", "tokens_per_second", "measure/success", "seconds/rollout", "seconds/coordination", "count/x")
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.dictionaries(KEYS, VALUES), max_size=4), max_size=4))
def test_no_row_stops_a_watcher(rounds: list[list[Row]]) -> None:
    view = LiveView(Console(file=io.StringIO(), width=80), Hands())
    watchers: list[Progress] = [Silent(), lines()[0]]
    everyone = Both(*watchers)
    everyone.started(facts())
    picture = Picture(facts=facts())
    for rows in rounds:
        everyone.rows(rows)
        view.rows(rows)
        picture = screen.noted(picture, rows)
        shown(picture, 1.0)
    everyone.finished(RESULT)


@pytest.mark.parametrize(
    ("stdout", "stderr", "again"), [("pipe", "pipe", "True"), ("a", "pipe", "True"), ("a", "a", "")]
)
def test_an_end_is_said_on_standard_error_unless_it_is_the_same_file(
    stdout: str, stderr: str, again: str, tmp_path: Path
) -> None:
    code = "import sys; from coordinator.cli.main import _elsewhere; print(_elsewhere() or '', file=sys.stderr, end='')"
    with (tmp_path / "a").open("w") as file:
        streams = {"pipe": subprocess.PIPE, "a": file}
        ran = subprocess.run(
            [sys.executable, "-c", code], stdout=streams[stdout], stderr=streams[stderr], text=True, check=True
        )
    assert (ran.stderr or (tmp_path / "a").read_text()) == again
