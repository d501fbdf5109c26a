"""The page about a run: what it shows, what it escapes, and which directories it can be made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.app.charts import MOST, thinned
from coordinator.app.lanes import spans_of_a_round
from coordinator.app.progress import ARRIVED, AgentFacts, Both, Row, RunFacts, RunResult, Silent
from coordinator.app.report import page
from coordinator.app.reporting import EVERY, FIRST, Reporting
from coordinator.app.rundir import Exit, RunDirectory, RunDirectoryError
from coordinator.app.timeline import Span, Timeline, read_timeline, rewind_timeline
from coordinator.cli.main import app
from scenarios import write_recordings
from tinker.protocol.episodes import Line, Recording
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Ended, EpisodeId, Phase, SeatName

EVIL = "<script>alert('x')</script>"
CONFIG = """
scenario = "talk"
seed = 7
rounds = 4
groups = 2
group_size = 2
model = "demo"
engine = "scripted"
[learning]
algorithm = "grpo"
rank = 8
lr = 0.002
[agents.bob.learning]
every = 0
"""


def train(round: int, agent: str, **values: Any) -> Row:
    row = {"round": round, "agent": agent, "reward_mean": 0.1 * round, "reward_std": 0.5, "phase": "train"}
    row |= {"episodes": 4, "rows": 4, "entropy": 1.0, "kl": 0.01, "grad_norm": 0.3, "forfeits": 0, "cut": 0}
    seconds = {"seconds/round": 2.0, "seconds/rollout": 1.0, "seconds/update": 0.8, "wait/update_end": 0.25}
    return row | seconds | values


def evaluate(round: int, **values: Any) -> Row:
    row = {"round": round, "agent": "ann", "phase": "evaluate", "evaluation": "held-out", "mode": "greedy"}
    return row | {"measure": "success", "value": 0.5, "n": 4, "episodes": 4} | values


def recording(index: int, score: float, lines: Sequence[Line] = (), said: str = "yes") -> Recording:
    heard = (Line(SeatName("ann"), "ask", "yes or no?", 0), Line(SeatName("ann"), "reply", said, 0))
    players = (SeatName("ann"), "ann@1"), (SeatName("bob"), "bob@0")
    scores = (SeatName("ann"), score), (SeatName("bob"), 0.0)
    place = EpisodeId(2, Phase.ROLLOUT, index)
    return Recording("run", place, "talk", 1, "5", "{}", players, (*heard, *lines), Ended.FINISHED, scores)


def made(
    path: Path, rows: Sequence[Row] = (), recordings: Sequence[Recording] = (), config: str = CONFIG
) -> RunDirectory:
    directory = RunDirectory.create(path / "run", "talk", config)
    directory.append(rows)
    if recordings:
        write_recordings(directory.recordings_path("rollout", 2), recordings)
    return directory


REWARDS = {"ann": 0.5, "bob": -0.5}
ROWS = [evaluate(0)] + [
    train(round, agent, reward_mean=round * REWARDS[agent]) for round in (1, 2) for agent in ("ann", "bob")
]
EPISODES = [recording(k, float(score)) for k, score in enumerate((0, 3, 1, 2))]


class Tags(HTMLParser):
    """Every element of a page, and whether it was closed in order."""

    VOID = frozenset({"meta", "path", "use", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes += attrs
        self.open += [] if tag in self.VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_it_says_what_ran_and_what_is_trained(tmp_path: Path) -> None:
    directory = made(tmp_path, ROWS, EPISODES)
    directory.finish(Exit("finished", 0, "all 2 rounds were played"))
    text = page(directory.path)
    assert "<strong>finished (exit code 0)</strong>: all 2 rounds were played" in text
    assert "<td>ann</td><td>ann</td><td>LoRA adapter of rank 8 by grpo, lr 0.002</td>" in text
    assert "<td>bob</td><td>bob</td><td>nothing: it is frozen</td>" in text
    assert "<dd>7</dd>" in text
    assert "2 of 4 done, 4 episodes each" in text


@pytest.mark.parametrize(
    "title", ["Reward", "Evaluations", "Reward spread", "Entropy", "KL to the base", "Gradient norm", "Time per round"]
)
def test_it_has_the_curve(tmp_path: Path, title: str) -> None:
    text = page(made(tmp_path, ROWS).path)
    assert re.search(rf"<figcaption>{title}[^<]*</figcaption><svg", text)


def test_agents_with_the_same_numbers_share_a_line_that_says_so(tmp_path: Path) -> None:
    rows = [train(1, "ann", entropy=1.0), train(1, "bob", entropy=2.0)]
    text = page(made(tmp_path, rows).path)
    assert ">all agents</text>" in text[text.index("<figcaption>Reward<") : text.index("<figcaption>KL")]
    assert ">bob</text>" in text[text.index("<figcaption>Entropy") : text.index("<figcaption>Gradient")]


def test_it_shows_the_best_the_worst_and_another_episode_in_words(tmp_path: Path) -> None:
    text = page(made(tmp_path, ROWS, EPISODES).path)
    titles = re.findall(r"<summary>(\w+): 2/rollout/(\d)</summary>", text)
    assert titles[:2] == [("Best", "1"), ("Worst", "0")]
    assert titles[2] in [("Random", "2"), ("Random", "3")]
    assert "ann is asked: yes or no?" in text


def test_forfeits_and_retries_are_counted_by_reason(tmp_path: Path) -> None:
    lines = [Line(SeatName("bob"), "complaint", "perhaps", 1), Line(SeatName("bob"), "forfeit", "say yes or no", 1)]
    text = page(made(tmp_path, ROWS, [recording(0, 1.0, lines), recording(1, 0.0, lines)]).path)
    assert '<td>bob</td><td>forfeited</td><td>say yes or no</td><td class="number">2</td>' in text
    assert '<td>bob</td><td>had to try again after</td><td>perhaps</td><td class="number">2</td>' in text


def test_a_seat_that_always_forfeits_is_a_warning(tmp_path: Path) -> None:
    forfeit = [Line(SeatName("bob"), "forfeit", "say yes or no", 1)]
    always = page(made(tmp_path, ROWS, [recording(k, 0.0, forfeit) for k in range(4)]).path)
    assert "seat bob forfeits in every episode of round 2" in always
    often = page(made(tmp_path / "often", ROWS, [recording(k, 0.0, forfeit if k else []) for k in range(4)]).path)
    assert "forfeits in every episode" not in often


def test_the_warnings_of_the_rows_are_shown(tmp_path: Path) -> None:
    text = page(made(tmp_path, [train(1, "ann", cut=2), train(2, "ann", entropy=0.001)]).path)
    assert "cut off by a limit" in text.split("<h2>What ran</h2>")[0]
    assert "None." not in text.split("<h2>What ran</h2>")[0]


def test_nothing_from_the_run_is_taken_for_html(tmp_path: Path) -> None:
    """The scenario's name, what is said, why it ended, and the names of agents, evaluations and measures, also within the drawings."""
    rows = [
        *(train(round, EVIL, **{f"measure/{EVIL}": float(round)}) for round in (1, 2)),
        *(evaluate(round, evaluation=EVIL, measure=EVIL, value=round / 2) for round in (0, 2)),
    ]
    lines = [Line(SeatName("bob"), "forfeit", EVIL, 1), Line(SeatName("bob"), "hear", f"</pre>{EVIL}<!--", 1)]
    config = CONFIG.replace('"talk"', f'"{EVIL}"').replace('"demo"', f'"{EVIL}"')
    directory = made(tmp_path, rows, [recording(k, float(k), lines, EVIL) for k in range(4)], config)
    directory.write_text(
        "timeline.jsonl", f'{{"round": 2, "agent": "{EVIL}", "what": "{EVIL}", "begin": 0, "end": 1}}\n'
    )
    directory.finish(Exit(EVIL, 1, EVIL))
    text = page(directory.path)
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "iframe", "img", "object", "a", "link", "foreignobject"} & set(tags.found)
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert text.count("alert(") > 15  # it is all there, as text


def test_it_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = page(made(tmp_path, ROWS, EPISODES).path)
    assert "://" not in text
    assert "@import" not in text
    links = [value for name, value in Tags(text).attributes if name in ("href", "xlink:href", "src")]
    assert links and all((value or "").startswith("#") for value in links)
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", text))


def test_drawings_take_their_colours_from_the_page_which_has_dark_and_light_ones(tmp_path: Path) -> None:
    text = page(made(tmp_path, ROWS, EPISODES).path)
    style, body = text.split("</style>", 1)
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert {"--paper", "--ink", "--a0", "--a1", "--e0"} <= used
    assert all(f"{name}: #" in light and f"{name}: #" in dark for name in used)
    assert "fill: currentColor" in body and "stroke: currentColor" in body
    assert re.findall(r"#[0-9a-f]{6}\b", "".join(re.findall(r'style="([^"]*)"', body))) == []


def test_a_run_that_goes_on_has_a_page_that_says_so(tmp_path: Path) -> None:
    text = page(made(tmp_path, ROWS).path)
    assert "not over: it goes on, or was killed" in text


def test_a_run_without_any_round_has_a_page(tmp_path: Path) -> None:
    text = page(made(tmp_path).path)
    assert "No round is finished yet." in text
    assert "<svg" not in text


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    directory = made(tmp_path, ROWS, EPISODES)
    whole = page(directory.path)
    directory.metrics.write_bytes(directory.metrics.read_bytes() + b'{"round": 3, "agent": "ann", "rewa')
    assert page(directory.path) == whole


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run directory"):
        page(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "no run directory" in result.output


def test_the_command_writes_the_page_of_an_old_run_where_it_is_told(tmp_path: Path) -> None:
    directory = made(tmp_path, ROWS, EPISODES)
    result = CliRunner().invoke(app, ["report", str(directory.path)])
    assert (result.exit_code, result.output.strip()) == (0, f"{directory.path}/report.html")
    other = tmp_path / "page.html"
    CliRunner().invoke(app, ["report", str(directory.path), "--out", str(other)])
    assert other.read_text() == (directory.path / "report.html").read_text() == page(directory.path)


# --- the timeline ---

FACTS = RunFacts(
    "talk", "", tuple(AgentFacts(name, (name,), name, "grpo") for name in ("ann", "bob")), "demo", 4, 4, Path("run"), 7
)


def waits(**seconds: float) -> tuple[Wait, ...]:
    return tuple(Wait(name, value, "") for name, value in seconds.items())


class At:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_round_leaves_spans_of_play_work_and_waits(tmp_path: Path) -> None:
    at = At()
    timeline = Timeline(tmp_path, at)
    timeline.started(FACTS)
    calls: list[tuple[float, Any]] = [
        (1, lambda: timeline.opened(1, Phase.ROLLOUT, Edge.START, waits(ann=0.0, bob=0.5))),
        (3, lambda: timeline.opened(1, Phase.ROLLOUT, Edge.END, waits(host=1.0))),
        (4, lambda: timeline.updating("ann", "gradient")),
        (6, lambda: timeline.updating("ann", "publish")),
        (7, lambda: timeline.updating("ann", ARRIVED)),
        (9, lambda: timeline.opened(1, Phase.UPDATE, Edge.END, waits(ann=2.0))),
    ]
    for seconds, call in calls:
        at.now = 100.0 + seconds
        call()
    timeline.flush()
    timeline.flush()
    assert sorted(read_timeline(tmp_path), key=lambda span: (span.begin, span.end)) == [
        Span(1, "bob", "wait/rollout_start", 0.5, 1.0),
        Span(1, "", "rollout", 1.0, 3.0),
        Span(1, "ann", "gradient", 4.0, 6.0),
        Span(1, "ann", "publish", 6.0, 7.0),
        Span(1, "ann", "wait/update_end", 7.0, 9.0),
    ]


def test_damaged_lines_of_a_timeline_are_left_out_and_later_rounds_are_removed(tmp_path: Path) -> None:
    spans = [f'{{"round": {k}, "agent": "ann", "what": "publish", "begin": {k}, "end": {k + 1}}}' for k in (1, 2, 3)]
    (tmp_path / "timeline.jsonl").write_text("\n".join([*spans, '{"round": 4', "7"]))
    assert [span.round for span in read_timeline(tmp_path)] == [1, 2, 3]
    rewind_timeline(tmp_path, 2)
    assert [span.round for span in read_timeline(tmp_path)] == [1, 2]


def test_the_lanes_are_those_of_the_newest_round_with_an_update() -> None:
    timeline = [Span(k, "ann", what, k, k + 1) for k in (1, 2) for what in ("gradient", "wait/update_end")]
    round, spans = spans_of_a_round([], [*timeline, Span(3, "", "rollout", 3, 4)])
    assert (round, spans) == (2, timeline[2:])


def test_a_run_without_a_timeline_has_lanes_made_of_its_seconds() -> None:
    rows = [train(2, "ann"), train(2, "bob", **{"wait/update_end": 0.0, "wait/update_start": 0.1})]
    round, spans = spans_of_a_round(rows, [])
    assert round == 2
    assert [(span.agent, span.what, span.begin, span.end) for span in spans] == [
        ("", "rollout", 0.0, 1.0),
        ("ann", "update", 1.1, pytest.approx(1.65)),
        ("ann", "wait/update_end", pytest.approx(1.65), pytest.approx(1.9)),
        ("bob", "wait/update_start", 1.0, 1.1),
        ("bob", "update", 1.1, pytest.approx(1.9)),
    ]


def test_every_agent_and_the_workers_have_a_lane(tmp_path: Path) -> None:
    text = page(made(tmp_path, ROWS, EPISODES).path)
    lanes = text[text.index("lane by lane") :]
    for name in ("ann", "bob", "rollout workers", "update workers", "waits at a barrier"):
        assert f">{name}</text>" in lanes


# --- while the run goes on ---


class Told(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def play(directory: RunDirectory, watcher: Both, rounds: Sequence[int]) -> None:
    for round in rounds:
        rows = [train(round, agent) for agent in ("ann", "bob")]
        directory.append(rows)
        watcher.rows(rows)


def test_the_page_is_kept_while_the_run_goes_on_and_at_its_end(tmp_path: Path) -> None:
    directory, at, told = made(tmp_path), At(), Told()
    watcher = Both(Reporting(directory.path, told, at), told)
    file = directory.path / "report.html"
    watcher.started(FACTS)
    play(directory, watcher, range(1, EVERY + 1))
    assert not file.exists()  # it has not run for long
    at.now += FIRST
    play(directory, watcher, [EVERY + 1])
    assert f"{EVERY + 1} of 4 done" in file.read_text()
    exit = Exit("interrupted", 0)
    directory.finish(exit)
    watcher.finished(RunResult(exit, (), (), (), 1.0))
    assert "interrupted (exit code 0)" in file.read_text()
    assert told.notes == []


def test_a_page_that_took_long_is_not_made_again_soon(tmp_path: Path) -> None:
    directory, at = made(tmp_path), At()

    class Slow(At):
        """Looking at the clock takes a second, so a page does, too."""

        def __call__(self) -> float:
            at.now += 1.0
            return at.now

    watcher = Both(Reporting(directory.path, Told(), Slow()))
    watcher.started(FACTS)
    at.now += FIRST
    play(directory, watcher, range(1, EVERY + 1))
    file = directory.path / "report.html"
    first = file.read_text()
    play(directory, watcher, range(EVERY + 1, 3 * EVERY))
    assert file.read_text() == first
    at.now += 50
    play(directory, watcher, [3 * EVERY])
    assert file.read_text() != first


def test_a_page_that_cannot_be_made_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    directory, told = made(tmp_path), Told()
    (directory.path / "timeline.jsonl").mkdir()
    watcher = Both(Reporting(directory.path, told, At()), told)
    watcher.started(FACTS)
    play(directory, watcher, range(1, 2 * EVERY))
    assert len(told.notes) == 1
    assert "timeline.jsonl" in told.notes[0]


def test_a_long_curve_has_few_points_that_are_averages() -> None:
    points = thinned([(float(k), float(k)) for k in range(10 * MOST)])
    assert len(points) == MOST
    assert points[0] == (4.5, 4.5)
