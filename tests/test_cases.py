"""The tables of cases in the documentation name tests that exist; and what no test can wait for: nothing reads the time of day."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from coordinator.app.names import PACKAGES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/testing.md").read_text()
ROW = re.compile(r"^\| (\d+|[A-Z]\d+) \| (.+) \| (.+) \| (?:`(test_\w+\.py)::(test_\w+)`|none) \|$", re.MULTILINE)
FIELD = {"A": 5, "B": 6, "K": 8, "L": 6, "M": 9, "N": 4}
TIME_OF_DAY = {  # what may be read of it: names of directories, dates in templates, and what replaces it in a rehearsal
    "coordinator/app/rundir.py",
    "coordinator/app/rehearsal.py",
    "tinker/tokens/chat_template.py",
}


def test_every_case_is_in_its_table_once() -> None:
    cases = [row[0] for row in ROW.findall(PAGE)]
    fields = [f"{letter}{number}" for letter, most in FIELD.items() for number in range(1, most + 1)]
    wanted = [*map(str, range(1, 43)), *fields, "F3", "H14", "H15", "J1", "J3"]
    assert sorted(cases) == sorted(wanted)


def test_every_test_that_a_case_names_exists() -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    defined: dict[str, set[str]] = {}
    for _, _, _, file, name in ROW.findall(PAGE):
        if file and file not in defined:
            tree = ast.parse(files[file].read_text())
            defined[file] = {
                each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        assert not file or name in defined[file], f"{file} has no {name}"


def test_no_interval_is_measured_by_the_time_of_day() -> None:
    """Cases 37 and M6: whatever is done to the time of day, nobody is given up or kept for it."""
    found = set()
    for path in (each for package in PACKAGES for each in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today", "time", "time_ns"):
                owner = node.value
                name = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                if name in ("time", "datetime", "date"):
                    found.add(str(path.relative_to(ROOT)))
    assert found == TIME_OF_DAY
