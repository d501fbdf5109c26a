"""`opentinker new` makes a package that works at once, and refuses what would get in somebody's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import app
from scenarios import load_scenario

ROOT = Path(__file__).parents[3]


def new(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["new", *map(str, words)])
    return result.exit_code, result.output


def test_a_new_package_passes_its_own_tests(tmp_path: Path) -> None:
    assert new("haggle", "--in", tmp_path)[0] == 0
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestDeprecationWarning",
        ],
        cwd=tmp_path / "haggle",
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_readme_names_its_own_files_and_commands(tmp_path: Path) -> None:
    code, output = new("haggle", "--in", tmp_path)
    made = [Path(line) for line in output.splitlines()[:-1]]
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "haggle").iterdir()) == sorted(path.name for path in made)
    assert "opentinker check haggle.py" in (tmp_path / "haggle" / "README.md").read_text()
    assert not any("$" in path.read_text() for path in made)


def test_what_it_makes_is_a_scenario_of_that_name(tmp_path: Path) -> None:
    new("haggle", "--in", tmp_path)
    made = load_scenario(str(tmp_path / "haggle" / "haggle.py"))
    assert (made.name, made.seats) == ("haggle", ("proposer", "responder"))


@pytest.mark.parametrize("name", ["class", "two words", "../up", "random", "scenarios", "_hidden", "1st", "a-b", ""])
def test_a_name_that_cannot_be_imported_or_hides_a_module_is_refused(name: str, tmp_path: Path) -> None:
    assert new(name, "--in", tmp_path)[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "haggle").mkdir()
    assert new("haggle", "--in", tmp_path)[0] == 2
    assert list((tmp_path / "haggle").iterdir()) == []
