"""Package names: nobody else installs ours, what is on disk is what is packaged, and no test module hides another."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from coordinator.app.names import PACKAGES, clashes

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_other_installed_distribution_provides_our_packages() -> None:
    assert clashes() == []


def test_a_distribution_that_provides_one_of_them_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "RECORD").write_text("tinker/__init__.py,,\nelsewhere/__init__.py,,\n")
    (info / "top_level.txt").write_text("tinker\nelsewhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    (message,) = clashes()
    assert "'tinker'" in message and "pip uninstall rival" in message and "make venv" in message


def test_the_packages_on_disk_are_the_packages_in_the_distribution() -> None:
    on_disk = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_two_test_modules_have_the_same_name() -> None:
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_test_module_is_named_like_an_imported_package() -> None:
    names = {file.stem for file in (ROOT / "tests").rglob("*.py")}
    assert names & (set(PACKAGES) | set(sys.stdlib_module_names)) == set()
