"""The documents name only files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


@pytest.mark.parametrize("document", ["docs/design.md", "CONTRIBUTING.md"])
def test_every_path_in_the_document_exists(document: str) -> None:
    named = PATH.findall((ROOT / document).read_text(encoding="utf-8"))
    assert len(named) > 5
    assert sorted(path for path in set(named) if not (ROOT / path).exists() and path != "runs/") == []


def test_every_module_of_the_core_is_in_the_design() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    modules = sorted(file.name for file in (ROOT / "coordinator/core").glob("*.py") if file.name != "__init__.py")
    assert [name for name in modules if f"`coordinator/core/{name}`" not in text] == []
