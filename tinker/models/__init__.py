"""Models that come with the package: the folders of two tiny base models, each of which knows a few text games."""

from pathlib import Path

DEMO: Path = Path(__file__).parent / "demo"
TABLE: Path = Path(__file__).parent / "table"
