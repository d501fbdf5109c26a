"""Rollouts: this engine against PEFT and transformers on the same work, and what its cache, its batching and its adapters cost.

    python bench/rollout.py [--only memory demo smollm2 turns group first outside load] [--repeats 5] [--results DIR] [--docs docs]

Contestants take turns, so that whatever else the machine does hits them alike; the unit is the CPU time of the process, all its threads and
the prompts included, reported are medians. Every case prints its lines; with `--docs` they go into the section "Rollouts" of
`performance.md`, and the plots beside it, when every case has run. SmolLM2 is fetched as `--model smollm2` does it. Needs
OMP_WAIT_POLICY=PASSIVE and starts itself again with it. `python bench/rollout.py --only demo` takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
TITLE = "## Rollouts"
ROWS, PROMPT, RANK = 32, 32, 8
LOADS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Report:
    """Lines of the table, and points of the plots: name of the plot -> name of the curve -> (x, y)."""

    repeats: int
    folder: Path
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)
    curves: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)

    def add(self, what: str, measured: str, bar: str = "reported", reached: bool | None = None) -> None:
        line = (what, measured, bar, "" if reached is None else "yes" if reached else "**no**")
        self.lines.append(line)
        print(f"| {' | '.join(line)} |", flush=True)

    def at_least(self, what: str, value: float, bar: float, stretch: float = 0.0, note: str = "") -> None:
        wanted = f"at least {bar:g}x" + (f"; stretch {stretch:g}x" if stretch else "")
        self.add(what, f"{value:.2f}x{note}", wanted, value >= bar)

    def take(self, told: dict[str, Any]) -> None:
        """The results of one case."""
        self.lines += [tuple(line) for line in told["lines"]]
        self.curves |= told["curves"]

    def point(self, plot: str, curve: str, x: int, y: float) -> None:
        self.curves.setdefault(plot, {}).setdefault(curve, []).append((x, y))


Contestants = dict[str, Callable[[Any], Awaitable[int]]]


async def speeds(contestants: Contestants, todo: Any, repeats: int) -> dict[str, float]:
    """Tokens per CPU second of each, the median over interleaved repeats; before them two tokens warm up."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for generate in contestants.values():
        await generate(replace(todo, tokens=2))
    for _ in range(repeats):
        for name, generate in contestants.items():
            began = time.process_time()
            count = await generate(todo)
            found[name].append(count / (time.process_time() - began))
    return {name: median(values) for name, values in found.items()}


def model_copy(report: Report, which: str) -> Path:
    from rollout_contestants import without_stops

    from tinker.models import DEMO
    from tinker.models.smollm2 import smollm2

    target = report.folder / which
    return target if target.exists() else without_stops(DEMO if which == "demo" else smollm2(print), target)


def engine_on(report: Report, which: str, slots: int = ROWS) -> Any:
    from tinker.engines.torch import TorchEngine

    return TorchEngine(str(model_copy(report, which)), slots=slots, threads=1, cache_bytes=1 << 30)


async def compare(report: Report, which: str, agents: int, tokens: int, repeats: int) -> dict[str, float]:
    """All contestants on one model."""
    import rollout_contestants as by

    names = [f"agent{number}" for number in range(agents)]
    async with engine_on(report, which) as engine:
        directories = await by.adapters(engine, names, RANK, report.folder)
        todo = by.work(engine.card.vocab, names, ROWS, PROMPT, tokens)
        peft, bare = by.peft_model(model_copy(report, which), directories), by.bare_model(model_copy(report, which))
        found = await speeds(
            {
                by.PER_AGENT: lambda todo: by.per_agent(peft, todo),
                by.TOGETHER: lambda todo: by.together(peft, todo),
                by.BARE: lambda todo: by.bare(bare, todo),
                by.OURS: lambda todo: by.ours(engine, todo, "n"),
                by.ONE: lambda todo: by.ours(engine, todo, "1", one=True),
            },
            todo,
            repeats,
        )
    for name, speed in found.items():
        report.add(f"{which}, {agents} adapters: {name}", f"{speed:,.0f} tokens per CPU second")
    return found


async def demo(report: Report) -> None:
    import rollout_contestants as by

    for agents, bars in ((8, ((3.5, 6.0), (2.3, 0.0))), (32, ((10.0, 15.0), (5.0, 0.0)))):
        found = await compare(report, "demo", agents, 24, report.repeats)
        for name, (bar, stretch) in zip((by.PER_AGENT, by.TOGETHER), bars, strict=True):
            report.at_least(f"demo, {agents} adapters, against {name}", found[by.OURS] / found[name], bar, stretch)
        if agents == 8:
            bare(report, "demo", found, 0.45)


async def smollm2(report: Report) -> None:
    import rollout_contestants as by

    found = await compare(report, "smollm2", 8, 8, max(1, report.repeats // 2))
    for name, bar in ((by.PER_AGENT, 1.9), (by.TOGETHER, 1.3)):
        report.at_least(f"smollm2, 8 adapters, against {name}", found[by.OURS] / found[name], bar)
    bare(report, "smollm2", found, 0.8)


def bare(report: Report, which: str, found: dict[str, float], bar: float) -> None:
    import rollout_contestants as by

    report.at_least(f"{which}, 8 adapters, against {by.BARE}", found[by.OURS] / found[by.BARE], bar, 0.95)
    report.at_least(f"{which}, one adapter for all rows, against the same", found[by.ONE] / found[by.BARE], 0.85, 0.95)


async def turns(report: Report, episodes: int = 3, count: int = 10, opening: int = 150, heard: int = 85) -> None:
    """Episodes of `count` turns of 8 sampled tokens, whose contexts grow to about 1,000."""
    import rollout_contestants as by

    spent, computed = {}, {}
    async with engine_on(report, "smollm2") as engine:
        start = by.work(engine.card.vocab, ["base"], episodes * count, opening, 8).prompts
        for kept in (True, False):
            contexts = [list(start[episode]) for episode in range(episodes)]
            began, before = time.process_time(), engine.prefilled
            for turn in range(count):
                if not kept:
                    await engine.forget("")
                asked = [by.base_request(str(seat), ids, 8, turn) for seat, ids in enumerate(contexts)]
                for seat, answer in enumerate(await asyncio.gather(*map(engine.generate, asked))):
                    contexts[seat] += [*answer.ids, *start[episodes + seat][:heard]]
            spent[kept], computed[kept] = time.process_time() - began, engine.prefilled - before
            await engine.forget("")
    note = (
        f" ({computed[False]:,} prompt tokens against {computed[True]:,}; contexts end at {len(contexts[0]) - heard})"
    )
    what = "smollm2, episodes of 10 turns: KV kept against computed again at each turn"
    report.at_least(what, spent[False] / spent[True], 2.5, note=note)


async def group(report: Report, members: int = 8, prompt: int = 256) -> None:
    import rollout_contestants as by

    async with engine_on(report, "demo") as engine:
        (ids,) = by.work(engine.card.vocab, ["base"], 1, prompt, 8).prompts
        await asyncio.gather(*(engine.generate(by.base_request(f"g{n}", ids, 8, n)) for n in range(members)))
        together = engine.prefilled
        for n in range(members):  # one after the other, each with a key of its own
            await engine.generate(by.base_request(f"h{n}", ids, 8, n))
        later = engine.prefilled - together
    what = f"a group of {members} with one prompt of {prompt} tokens: prompt tokens computed"
    told = f"{together} of {members * prompt} (asked again one by one: {later})"
    report.add(what, told, "the prompt once", together == prompt)


async def first(report: Report) -> None:
    """CPU time from asking to the first token: of the engine alone, so that other work on the machine does not count."""
    import rollout_contestants as by

    for which in ("demo", "smollm2"):
        async with engine_on(report, which, ROWS + 8) as engine:
            prompts = by.work(engine.card.vocab, ["base"], ROWS + 12, PROMPT, 1).prompts
            once = partial(first_token, engine, prompts)
            idle = [await once(number) for number in range(6)]
            long = (by.base_request(f"long{n}", prompts[12 + n], 40) for n in range(ROWS))
            others = [asyncio.create_task(engine.generate(each)) for each in long]
            await once(6)  # behind their prompts
            busy = [await once(number) for number in range(7, 12)]
            began, steps = time.process_time(), 10
            await engine.generate(by.base_request("steps", prompts[0], steps + 1))
            step = (time.process_time() - began) / (steps + 1)
            for each in others:
                each.cancel()
        told = f"{median(busy) * 1e3:.0f} ms against {median(idle) * 1e3:.0f} ms; one decode step takes {step * 1e3:.0f} ms"
        late = median(busy) - median(idle)
        what = f"{which}: first token while {ROWS} rows decode, against idle"
        report.add(what, told, "within one decode step", late <= step * 1.1)


async def first_token(engine: Any, prompts: list[list[int]], number: int) -> float:
    import rollout_contestants as by

    began = time.process_time()
    await engine.generate(by.base_request(f"first{number}", prompts[number], 1))
    return time.process_time() - began


async def outside(report: Report, rows: int = 16, steps: int = 8) -> None:
    """The profiler's own work counts as ours, so this is an upper bound."""
    import rollout_contestants as by
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tinker.engines.torch.generate import Batch, Served
    from tinker.engines.torch.model import load_model

    torch.set_num_threads(1)
    model = load_model(str(model_copy(report, "smollm2")))
    batch = Batch(model, rows, 0)
    for number, prompt in enumerate(by.work(model.card.vocab, ["base"], rows, PROMPT, 1).prompts):
        batch.add(by.base_request(str(number), prompt, 200), Served("", None), lambda answer: None, lambda: False)
    shares = []
    with torch.inference_mode():
        stepping(batch, 4)
        for _ in range(max(5, report.repeats)):
            with profile(activities=[ProfilerActivity.CPU]) as told:
                wall = stepping(batch, steps)
            inside = sum(event.time_range.elapsed_us() for event in told.events() if event.cpu_parent is None)
            shares.append(1.0 - inside / 1e6 / steps / wall)
    share = median(shares)
    what = f"smollm2, {rows} rows: share of the decode loop's wall time outside torch"
    report.add(what, f"{share:.1%} (the profiler's own work included)", "at most 10 %", share <= 0.1)


def stepping(batch: Any, steps: int) -> float:
    """Wall seconds of a step."""
    began = time.perf_counter()
    for _ in range(steps):
        batch.tick()
    return (time.perf_counter() - began) / steps


async def memory(report: Report, agents: int = 32) -> None:
    """What the process grew by since it had imported torch: by loading the base (with its packed copy), and by serving a batch of all the
    adapters after the same batch without any (so caches of contexts, which copies would need as well, do not count). It is the first case,
    because what others have used stays with the process."""
    import psutil
    import rollout_contestants as by

    process = psutil.Process()
    empty = process.memory_info().rss
    copies = agents * (model_copy(report, "smollm2") / "model.safetensors").stat().st_size
    names = [f"agent{number}" for number in range(agents)]
    async with engine_on(report, "smollm2") as engine:
        base = process.memory_info().rss - empty
        todo = by.work(engine.card.vocab, names, ROWS, PROMPT, 2)
        await asyncio.gather(*(engine.generate(by.base_request(str(n), ids, 2)) for n, ids in enumerate(todo.prompts)))
        warm = process.memory_info().rss
        await by.adapters(engine, names, RANK, report.folder)
        await by.ours(engine, todo, "m")
        grown = process.memory_info().rss - warm
    whole = base + grown
    what = f"smollm2, {agents} agents served: memory against {agents} full copies of the weights"
    sizes = f"{whole / 1e9:.2f} GB, {grown / 1e9:.2f} GB of it for the adapters; copies {copies / 1e9:.1f} GB"
    report.add(what, f"1/{copies / whole:.1f} ({sizes})", "at most 1/8", whole <= copies / 8)


async def load(report: Report) -> None:
    """Cost of a token against the number of agents, and against the number of rows, on the demo model."""
    import rollout_contestants as by

    async with engine_on(report, "demo", max(LOADS)) as engine:
        names = [f"agent{number}" for number in range(32)]
        directories = await by.adapters(engine, names, RANK, report.folder)
        peft = by.peft_model(model_copy(report, "demo"), directories)
        contestants: Contestants = {
            by.PER_AGENT: lambda todo: by.per_agent(peft, todo),
            by.TOGETHER: lambda todo: by.together(peft, todo),
            by.OURS: lambda todo: by.ours(engine, todo, "a"),
        }
        for agents in LOADS[:-1]:
            todo = by.work(engine.card.vocab, names[:agents], ROWS, PROMPT, 12)
            for name, speed in (await speeds(contestants, todo, 1)).items():
                report.point("agents, 32 rows", name, agents, 1e3 / speed)
        for rows in LOADS:
            todo = by.work(engine.card.vocab, names[:8], rows, PROMPT, 24)
            (speed,) = (await speeds({by.OURS: contestants[by.OURS]}, todo, 3)).values()
            report.point("rows, 8 agents", by.OURS, rows, 1e3 / speed)


CASES: dict[str, Callable[[Report], Awaitable[None]]] = {
    each.__name__: each for each in (memory, demo, smollm2, turns, group, first, outside, load)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--results", type=Path, help="keep each case's results here; what is there is not measured again"
    )
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = Report(given.repeats, Path(folder))
        print("| what | measured | bar | reached |\n|---|---|---|---|")
        for name in given.only:
            kept = given.results / f"{name}.json" if given.results else None
            if kept and kept.exists():
                report.take(json.loads(kept.read_text()))
                continue
            of_case = replace(report, lines=[], curves={})
            asyncio.run(CASES[name](of_case))
            told = {"lines": of_case.lines, "curves": of_case.curves}
            report.take(told)
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(told))
    if given.docs and list(given.only) == list(CASES):
        write(report, given.docs)


def write(report: Report, docs: Path) -> None:
    """The section of the page, and the plot."""
    page = docs / "performance.md"
    before = page.read_text() if page.exists() else "# Performance\n"
    rows = "\n".join(f"| {' | '.join(line)} |" for line in report.lines)
    section = (
        f"{TITLE}\n\nWritten by `bench/rollout.py`: {os.cpu_count()} cores, one thread, Python {platform.python_version()}, load "
        f"{os.getloadavg()[0]:.1f} at the end, fp32, {ROWS} rows with prompts of {PROMPT} tokens, LoRA of rank {RANK} on all layers; "
        f"medians of {report.repeats} interleaved repeats (SmolLM2: {max(1, report.repeats // 2)}) in CPU time of the process.\n\n"
        f"| what | measured | bar | reached |\n|---|---|---|---|\n{rows}\n\n"
        f"![CPU time of a token against the number of agents and of rows](rollout.png)\n"
    )
    head, _, rest = before.partition(TITLE)
    after = rest.partition("\n## ")
    page.write_text(head.rstrip() + "\n\n" + section + ("\n## " + after[2] if after[1] else ""))
    plot(report, docs / "rollout.png")


def plot(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(1, len(report.curves), figsize=(11, 4), layout="constrained", squeeze=False)
    for axis, (name, curves) in zip(axes[0], report.curves.items(), strict=True):
        for curve, points in curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=curve)
        axis.set(xscale="log", yscale="log", xlabel=f"{name} (demo model)", ylabel="CPU ms per sampled token")
        axis.set_xticks(LOADS, [str(size) for size in LOADS])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
