"""Models that come with the package: `DEMO` is the folder of a tiny base model that knows a few text games."""

from pathlib import Path

DEMO: Path = Path(__file__).parent / "demo"
