"""Which directory a model's name means, and whether it can be used at all: checked before anything is started."""

from __future__ import annotations

from pathlib import Path

from coordinator.app.config import ConfigError
from tinker.models import DEMO
from tinker.tokens import ChatTemplate, Tokenizer, TokenizerError, check_fits, check_model_dir


def model_directory(name: str) -> Path:
    """`demo`, a local directory, or a hub name (fetched if it is not cached). ConfigError says what is wrong and what to do."""
    if name == "demo":
        path = DEMO
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


def _from_hub(name: str) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"model: there is no directory {name}; give a model directory, a hub name, or `demo`")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name))
    except ImportError as error:
        raise ConfigError(
            f"model: {name!r} is no directory, and fetching it from a hub needs the extra: pip install 'opentinker[train]'"
        ) from error
    except Exception as error:  # whatever the hub's client raises: no network, no such model, no access
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: {name!r} is no directory here and could not be fetched from the hub ({type(error).__name__}: {reason}); "
            "give a local model directory, or `demo`"
        ) from error
