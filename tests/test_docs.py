"""The documentation is true: what it shows runs, what it names exists, and nothing that exists is missing from it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from agents.players.player import Answer, Need
from agents.players.scripted import ScriptedPlayer
from coordinator.app.config import Barriers, Learning, RunConfig
from coordinator.app.rollout import LaunchConfig, RolloutConfig
from coordinator.cli.main import app
from scenarios import Forfeited, Identity, Scenario, load_scenario, play_episode
from scenarios.library import library
from tinker.protocol.values import Ended, EpisodeId, Phase, SeatName

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / name for name in ("README.md", "CONTRIBUTING.md")) + tuple(sorted((ROOT / "docs").glob("*.md")))
RUNNING = (ROOT / "docs" / "running.md").read_text()
SCENARIOS = (ROOT / "docs" / "scenarios.md").read_text()
EXAMPLES = tuple(sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\.venv/bin/)?opentinker [^`]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(*languages: str) -> list[object]:
    return [
        pytest.param(page, text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (language, text) in enumerate(BLOCK.findall(page.read_text()), start=1)
        if language in languages
    ]


def command_lines() -> list[object]:
    """Every `opentinker ...` that the pages show, in shell blocks and in running text, without its first word."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        shown = [line for language, block in BLOCK.findall(text) if language == "sh" for line in block.splitlines()]
        for line in [*shown, *INLINE.findall(BLOCK.sub("", text))]:
            words = shlex.split(line, comments=True)
            if words and words[0].endswith("opentinker") and "…" not in line:
                found[" ".join(words[1:])] = words[1:]
    return [pytest.param(words, id=text) for text, words in sorted(found.items())]


def first_cells(text: str) -> dict[str, str]:
    """The rows of all tables: what the first cell names in code, and the second cell."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {name: row[1].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[0]) if len(row) > 1}


class NoTurns:
    """Scripted players need no generations."""

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        raise AssertionError(f"{', '.join(needs)} want to generate")


async def play(scenario: Scenario) -> Ended:
    """One episode with the baselines, or with players that always cooperate."""
    scripts = {seat: scenario.baselines.get(seat, lambda heard, prompt, rng: "cooperate") for seat in scenario.seats}
    players = {SeatName(seat): ScriptedPlayer(script, Random(seat)) for seat, script in scripts.items()}
    identity = Identity("docs", EpisodeId(1, Phase.ROLLOUT, 0))
    episode = await play_episode(
        scenario, players, NoTurns(), identity=identity, rng_seed=1, params={}, clock=lambda: 0.0
    )
    return episode.ended


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_every_python_block_runs(page: Path, text: str, tmp_path: Path) -> None:
    """In a process of its own, as a file of its own; and the scenarios that it declares can be played."""
    file = tmp_path / "block.py"
    file.write_text(text)
    ran = subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    if "@scenario(" in text:
        assert asyncio.run(play(load_scenario(str(file)))) in (Ended.FINISHED, Ended.FORFEITED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_shown_whole(example: Path) -> None:
    language = {".py": "python", ".toml": "toml"}[example.suffix]
    shown = [text for page in PAGES for kind, text in BLOCK.findall(page.read_text()) if kind == language]
    assert example.read_text() in shown


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_every_toml_block_is_a_configuration(page: Path, text: str) -> None:
    RunConfig.model_validate({"scenario": "nim", **tomllib.loads(text)})


@pytest.mark.parametrize("words", command_lines())
def test_every_command_line_is_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` is taken up to `--check`; the others are parsed. Words in capitals and paths of the reader's stand for something."""
    monkeypatch.chdir(ROOT)
    if words[0].startswith("--"):
        assert CliRunner().invoke(app, words).exit_code == 0
        return
    if words == ["run"]:  # the command, named in running text
        return
    COMMANDS[words[0]].make_context(words[0], words[1:])
    if words[0] == "run" and not re.match(r"[A-Z]+$|path/to/|--resume", words[1]):
        checked = CliRunner().invoke(app, [*words, "--check"])
        assert (checked.exit_code, checked.output[:10]) == (0, "scenario =")


def test_every_command_and_option_is_explained() -> None:
    cells = first_cells(RUNNING)
    for name, command in COMMANDS.items():
        assert f"### `opentinker {name}" in RUNNING
        shown = [param for param in command.params if not getattr(param, "hidden", False)]
        options = [max(param.opts, key=len) for param in shown if param.param_type_name == "option"]
        explained = {cell.split()[0] for cell in cells}
        assert set(options) - {"--help"} <= explained, name


SECTIONS = {
    RunConfig: "",
    RolloutConfig: "[rollout]",
    LaunchConfig: "[rollout.launch]",
    Learning: "[learning]",
    Barriers: "[barriers]",
}


def explained(section: str) -> dict[str, str]:
    """The keys of one section of the configuration and what is said to be their default."""
    text = RUNNING.partition("## Configuration")[2].partition("## Run directory")[0]
    if section:
        text = text.partition(f"\n`{section}`")[2]
    return first_cells(re.split(r"\n`\[", text)[0])


@pytest.mark.parametrize("model", SECTIONS, ids=lambda model: model.__name__)
def test_every_key_of_the_configuration_is_explained_with_its_default_and_no_other(model: type[BaseModel]) -> None:
    cells = explained(SECTIONS[model])
    for name, key in model.model_fields.items():
        default = key.get_default(call_default_factory=True)
        said = cells[name].strip("`")
        if not key.is_required() and not isinstance(default, BaseModel):
            assert tomllib.loads(f"x = {said}")["x"] == json.loads(json.dumps(default)), name
    assert set(cells) == set(model.model_fields)


def test_every_scenario_of_the_library_is_explained_with_its_parameters() -> None:
    rows = {line.split("`")[1]: line for line in SCENARIOS.splitlines() if line.startswith("| `")}
    for name, scenario in library().items():
        assert f"`{name}`" in (ROOT / "README.md").read_text()
        assert f"`{name}`" in RUNNING
        assert ", ".join(scenario.seats) in rows[name]
        for parameter in scenario.parameters:
            assert f"`{parameter.name}` ({json.dumps(parameter.default)}" in rows[name]


def test_every_metric_of_a_run_is_explained(tmp_path: Path) -> None:
    """The README's scenario, for real, without a model; this is also the test that the example runs."""
    command = 'run examples/first_scenario.py --engine scripted --rounds 2 --set replies=["cooperate","defect"]'
    ran = subprocess.run(
        [sys.executable, "-m", "coordinator.cli.main", *shlex.split(command.replace('"', '\\"')), "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    explained = set(re.findall(r"`([^`]+)`", RUNNING.partition("## Metrics")[2].partition("## Environment")[0]))
    keys = {re.sub(r"^measure/.*", "measure/<name>", key) for row in rows for key in row}
    assert len(rows) == 4
    assert keys - explained == set()
    assert {each.name for each in tmp_path.iterdir()} - set(re.findall(r"[\w.]+", RUNNING)) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if not link.startswith(("http://", "https://")):
            path, _, section = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if section else []
            assert not section or section in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]


def test_every_make_target_that_is_named_exists() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {name for page in PAGES for name in re.findall(r"`?\bmake ([a-z]+)(?:`|  )", page.read_text())}
    assert named and named <= set(targets)


@pytest.mark.parametrize("picture", ["run.svg", "run-end.svg"])
def test_the_pictures_are_whole_and_fetch_nothing(picture: str) -> None:
    text = (ROOT / "docs" / picture).read_text()
    ET.fromstring(text)
    assert "url(http" not in text and "href" not in text
