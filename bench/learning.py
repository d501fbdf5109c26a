"""Do the shipped scenarios learn? Fixed seeds, real runs through `opentinker run`, a table and a plot.

    python bench/learning.py [--out runs/learning] [--seeds 0 1 2 3 4] [--only guess nim ...] [--docs docs]

Writes `docs/learning.md` and `docs/learning.png`. A run whose directory is already complete is read, not played again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario to be shown: its rounds, settings, what is measured before and after, and the bar."""

    name: str
    scenario: str
    rounds: int
    measure: str
    value: Callable[[Rows], tuple[float, float]]
    curve: Callable[[Rows], list[tuple[int, float]]]
    bar: Callable[[Sequence[float]], bool]
    bar_words: str
    settings: tuple[str, ...] = ()
    seeds: int = 5  # how many of the given ones at most
    note: str = ""


def training_curve(measure: str) -> Callable[[Rows], list[tuple[int, float]]]:
    """(round, mean of the measure) over training rounds."""

    def curve(rows: Rows) -> list[tuple[int, float]]:
        found = {row["round"]: row[f"measure/{measure}"] for row in rows if row["phase"] == "train"}
        return sorted(found.items())

    return curve


def evaluation_curve(evaluation: str, mode: str) -> Callable[[Rows], list[tuple[int, float]]]:
    """(round, value) of an evaluation, averaged over its agents and over the evaluations whose name begins so."""

    def curve(rows: Rows) -> list[tuple[int, float]]:
        values: dict[int, list[float]] = {}
        for row in rows:
            if row["phase"] == "evaluate" and row["evaluation"].startswith(evaluation) and row["mode"] == mode:
                values.setdefault(row["round"], []).append(row["value"])
        return sorted((round, fmean(each)) for round, each in values.items())

    return curve


def first_and_last(
    curve: Callable[[Rows], list[tuple[int, float]]], first: int, last: int
) -> Callable[[Rows], tuple[float, float]]:
    """Means over the first and the last points of a curve."""

    def value(rows: Rows) -> tuple[float, float]:
        points = [value for _, value in curve(rows)]
        return fmean(points[:first]), fmean(points[-last:])

    return value


GUESS = training_curve("success")
NIM = evaluation_curve("perfect", "sampled")
DILEMMA = training_curve("cooperation")
COLOURS = training_curve("right")
JOBS = (
    Job(
        "guess",
        "guess",
        60,
        "success rate (first 5 rounds; last 10)",
        first_and_last(GUESS, 5, 10),
        GUESS,
        lambda after: min(after) >= 0.55 and fmean(after) >= 0.75,
        "each >= 0.55, mean >= 0.75",
    ),
    Job(
        "nim",
        "nim",
        40,
        "wins against the perfect player from won positions (round 0; last)",
        first_and_last(NIM, 1, 1),
        NIM,
        lambda after: min(after) >= 0.9,
        "each >= 0.9",
    ),
    Job(
        "dilemma, own payoffs",
        "dilemma",
        20,
        "cooperation rate (first round; last 3)",
        first_and_last(DILEMMA, 1, 3),
        DILEMMA,
        lambda after: max(after) < 0.1,
        "each < 0.1",
        ("params.payoff=own",),
    ),
    Job(
        "dilemma, shared payoffs",
        "dilemma",
        20,
        "cooperation rate (first round; last 3)",
        first_and_last(DILEMMA, 1, 3),
        DILEMMA,
        lambda after: min(after) > 0.95,
        "each > 0.95",
        ("params.payoff=shared",),
    ),
    Job(
        "colours",
        "colours",
        16,
        "right answers (first round; last 3), SmolLM2-135M-Instruct, one thread",
        first_and_last(COLOURS, 1, 3),
        COLOURS,
        lambda after: sorted(after)[1] > 0.8,
        "in 2 of 3 seeds > 0.8",
        ("model=smollm2", "threads=1"),
        seeds=3,
        note="Right means that the listener named the colour that the speaker had been told, and no other. In the last rounds most groups\n"
        "are right in all their episodes and teach nothing. No seed failed.",
    ),
)


def play(job: Job, seed: int, out: Path) -> Path:
    """Play one run unless its directory holds a finished one; returns the directory."""
    directory = out / f"{job.name.replace(', ', '-').replace(' ', '-')}-{seed}"
    ended = directory / "exit.json"
    if ended.exists() and json.loads(ended.read_text())["reason"] == "finished":
        return directory
    command = [sys.executable, "-m", "coordinator.cli.main", "run", job.scenario]
    command += ["--seed", str(seed), "--rounds", str(job.rounds), "--out", str(directory)]
    for setting in job.settings:
        command += ["--set", setting]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (directory / "wall.json").write_text(json.dumps({"seconds": time.monotonic() - began}))
    return directory


def read(directory: Path) -> tuple[Rows, float]:
    """The metrics rows and the wall time of the whole command."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((directory / "wall.json").read_text())["seconds"]


def share(rows: Rows) -> float:
    """Which part of the rounds' wall time was coordination."""
    per_round = {row["round"]: row for row in rows if row["phase"] == "train" and "seconds/coordination" in row}
    whole = sum(row["seconds/round"] for row in per_round.values())
    return sum(row["seconds/coordination"] for row in per_round.values()) / whole


def cpu_per_turn(rows: Rows) -> float:
    """CPU seconds of the coordinator process for each turn, over the whole run."""
    found = [row["coordinator_cpu_per_turn"] for row in rows if row.get("coordinator_cpu_per_turn")]
    return float(found[-1])


def table(job: Job, seeds: Sequence[int], runs: Sequence[tuple[Rows, float]]) -> list[str]:
    """Markdown of one job."""
    lines = [f"## {job.name}", "", f"{job.rounds} rounds; {job.measure}. Bar: {job.bar_words}.", ""]
    lines += [job.note, ""] if job.note else []
    lines += [
        "| seed | before | after | wall s | coordination | coordinator CPU per turn |",
        "|---|---|---|---|---|---|",
    ]
    after = []
    for seed, (rows, wall) in zip(seeds, runs, strict=True):
        before, now = job.value(rows)
        after.append(now)
        lines.append(
            f"| {seed} | {before:.2f} | {now:.2f} | {wall:.0f} | {share(rows):.1%} | {cpu_per_turn(rows) * 1e6:.0f} us |"
        )
    verdict = "met" if job.bar(after) else "NOT met"
    return [*lines, f"| mean | | {fmean(after):.2f} | | | |", "", f"Bar {verdict}.", ""]


def plot(results: dict[str, tuple[Job, list[tuple[Rows, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(results), figsize=(4.2 * len(results), 3.4), layout="constrained", squeeze=False
    )
    for axis, (name, (job, runs)) in zip(axes[0], results.items(), strict=True):
        for rows, _ in runs:
            points = job.curve(rows)
            axis.plot([x for x, _ in points], [y for _, y in points], alpha=0.8, linewidth=1.4)
        axis.set(title=name, xlabel="round", ylim=(-0.03, 1.03))
        axis.set_ylabel(job.measure.partition(" (")[0], fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=[job.name for job in JOBS])
    given = parser.parse_args()
    results: dict[str, tuple[Job, list[tuple[Rows, float]]]] = {}
    for job in JOBS:
        if not any(job.name.startswith(name) for name in given.only):
            continue
        runs = [read(play(job, seed, given.out)) for seed in given.seeds[: job.seeds]]
        results[job.name] = (job, runs)
        print("\n".join(table(job, given.seeds[: job.seeds], runs)), flush=True)
    page = [
        "# Learning curves",
        "",
        "Made by `python bench/learning.py` on 2 CPU cores, one run at a time. Wall times: the whole command.",
        "",
    ]
    page += ["![curves of every seed](learning.png)", ""]
    for job, runs in results.values():
        page += table(job, given.seeds[: job.seeds], runs)
    (given.docs / "learning.md").write_text("\n".join(page))
    plot(results, given.docs / "learning.png")


if __name__ == "__main__":
    main()
