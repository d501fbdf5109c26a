"""Which directory a model's name means, and whether it can be used at all: checked before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

from coordinator.app.config import ConfigError
from tinker.models import DEMO, TABLE
from tinker.models.smollm2 import NAME as SMOLLM2
from tinker.models.smollm2 import ModelNotFetched, smollm2
from tinker.tokens import ChatTemplate, Tokenizer, TokenizerError, check_fits, check_model_dir
from tinker.tokens.model_dir import model_name

SHIPPED = {"demo": DEMO, "table": TABLE}
HUB_PATIENCE = 5.0  # seconds the hub may take to say whether it has a model


def model_directory(name: str) -> Path:
    """`demo`, `table`, `smollm2`, a local directory, or a hub name (fetched if it is not cached).

    ConfigError says what is wrong and what to do.
    """
    if name in SHIPPED:
        path = SHIPPED[name]
    elif name == SMOLLM2 and not Path(name).is_dir():
        path = _smollm2()
    elif Path(name).expanduser().exists():
        path = Path(name).expanduser().resolve()
    else:
        path = _from_hub(name)
    try:
        tokenizer = Tokenizer.from_dir(path)
        ChatTemplate(tokenizer)
        check_fits(tokenizer, check_model_dir(path))
    except TokenizerError as error:
        raise ConfigError(f"model {name!r} cannot be used: {error}") from error
    return path


def called(name: str) -> str:
    """What a task server calls the model that this name means ("" means none)."""
    path = Path(name).expanduser()
    return model_name(path) if name and path.exists() else name.rpartition("/")[2]


def adaptable(directory: Path) -> frozenset[str]:
    """Names of the layers with a weight matrix, from the headers of the weight files alone; empty if there are none to read."""
    found: set[str] = set()
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "np") as file:
                matrices = [key for key in file.keys() if len(file.get_slice(key).get_shape()) == 2]  # noqa: SIM118 (no dict)
                found.update(key.split(".")[-2] for key in matrices if key.endswith(".weight") and key.count("."))
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model {directory}: {path.name} cannot be read ({error}); copy or save the model again"
        ) from error
    return frozenset(found)


def _smollm2() -> Path:
    try:
        return smollm2(lambda text: print(text, file=sys.stderr, flush=True))
    except ModelNotFetched as error:
        raise ConfigError(f"model: {error}") from error


def _from_hub(name: str) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"model: there is no directory {name}; give a model directory, a hub name, `demo` or `smollm2`"
        )
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model: {name!r} is no directory, and fetching it from a hub needs the extra: pip install 'opentinker[train]'"
        ) from error
    try:
        HfApi().model_info(name, timeout=HUB_PATIENCE)  # `snapshot_download` would wait for a silent hub without end
    except Exception as error:  # whatever the hub's client raises: no network, no such model, no access
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except Exception:
            raise _not_fetched(name, error) from error
    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise _not_fetched(name, error) from error


def _not_fetched(name: str, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return ConfigError(
        f"model: {name!r} is no directory here and could not be fetched from the hub ({type(error).__name__}: {reason}); "
        "give a local model directory, `demo` or `smollm2`"
    )
