"""Scenarios are found by name in the library, or in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario_fakes import play, scripted

from scenarios import ScenarioError, load_scenario
from tinker.protocol.values import Ended

ONE = '''
from scenarios import Scores, Table, scenario
{more}
@scenario("ann", version=1)
async def solo(table: Table) -> Scores:
    """Alone."""
    return {{"ann": float(await table["ann"].act("?", len))}}
'''
TWO = (
    ONE
    + '''
@scenario("ann", version=1)
async def second(table: Table) -> Scores:
    """Also alone."""
    return {{"ann": 2.0}}
'''
)


def write(folder: Path, text: str, more: str = "", name: str = "mine.py") -> str:
    (folder / name).write_text(text.format(more=more))
    return str(folder / name)


async def test_a_scenario_in_a_file_is_loaded_and_plays(tmp_path: Path) -> None:
    loaded = load_scenario(write(tmp_path, ONE))
    episode = await play(loaded, scripted(ann=lambda heard, prompt, rng: "four"))
    assert (episode.ended, episode.scores) == (Ended.FINISHED, (("ann", 4.0),))


def test_a_file_of_several_scenarios_needs_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    with pytest.raises(ScenarioError, match=r"name one of them as .*mine.py:name; it has: solo, second"):
        load_scenario(path)
    assert load_scenario(f"{path}:second").name == "second"
    with pytest.raises(ScenarioError, match=r"no scenario 'secnd' .did you mean 'second'"):
        load_scenario(f"{path}:secnd")


def test_a_scenario_that_a_file_only_imports_is_not_its_own(tmp_path: Path) -> None:
    write(tmp_path, ONE.replace("solo", "imported"), name="beside_the_scenario.py")
    path = write(tmp_path, ONE, more="from beside_the_scenario import imported")
    assert load_scenario(path).name == "solo"


def test_a_file_that_fails_is_the_authors_and_named(tmp_path: Path) -> None:
    path = write(tmp_path, ONE, more="1 / 0")
    with pytest.raises(ScenarioError, match=r"mine.py could not be imported: ZeroDivisionError"):
        load_scenario(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no scenario file .*nowhere.py"):
        load_scenario(str(tmp_path / "nowhere.py"))


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    library = pytest.importorskip("scenarios.library").library()
    known = sorted(library)[0]
    assert load_scenario(known) is library[known]
    with pytest.raises(ScenarioError, match=rf"did you mean '{known}'.*the library has: {known}"):
        load_scenario(known + "x")
