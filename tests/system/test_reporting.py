"""The page and the timeline of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from system_scenarios import three_turns
from system_world import Notes, world

from coordinator.app.progress import Row, RunFacts, RunResult
from coordinator.app.report import page
from coordinator.app.reporting import Reporting
from coordinator.app.timeline import Span, read_timeline
from tinker.protocol.to_host import Wait
from tinker.protocol.values import Edge, Phase


class Reported(Notes):
    """Notes what the user would read, and keeps the report as the command line does."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.report = Reporting(run, self)
        self.going: list[str] = []  # the page after each round, as it would be made then

    def started(self, facts: RunFacts) -> None:
        self.report.started(facts)
        self.run = facts.out

    def opened(self, round: int, phase: Phase, edge: Edge, waits: tuple[Wait, ...]) -> None:
        self.report.opened(round, phase, edge, waits)

    def updating(self, agent: str, what: str) -> None:
        self.report.updating(agent, what)

    def rows(self, rows: Sequence[Row]) -> None:
        self.report.rows(rows)
        self.going.append(page(self.run))

    def finished(self, result: RunResult) -> None:
        super().finished(result)
        self.report.finished(result)


def ordered(spans: Sequence[Span]) -> list[str]:
    return [span.what for span in sorted(spans, key=lambda span: (span.begin, span.end)) if "wait/" not in span.what]


async def test_a_run_leaves_a_page_and_a_timeline_of_every_round(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.serve(["1", "2", "3", "4", "7"])
        watcher = Reported(here.place / "run")
        ran = await here.run(three_turns, watcher=watcher, groups=2, group_size=4)
    assert ran.notes == []
    text = (ran.path / "report.html").read_text()
    assert "finished (exit code 0)" in text and "Best: 2/rollout/" in text and "Round 2, lane by lane" in text
    assert ["1 of 2 done" in watcher.going[0], "2 of 2 done" in watcher.going[1]] == [True, True]
    assert all("not over" in each for each in watcher.going)

    timeline = read_timeline(ran.path)
    agents = {span.agent for span in timeline} - {""}
    assert agents == {"ann", "bob"}
    for round in (1, 2):
        here_now = [span for span in timeline if span.round == round]
        assert ordered([span for span in here_now if not span.agent]) == ["rollout"]
        for agent in agents:
            assert ordered([span for span in here_now if span.agent == agent]) == ["gradient", "optimizer", "publish"]
    assert all(span.begin <= span.end for span in timeline)
