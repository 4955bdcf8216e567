"""Where a model's files are: the embedded tiny one, a directory, or a Hugging Face repository fetched on demand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.tiny import tiny_directory

TINY_MODEL: Final = "tiny"

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_PATTERNS = ["*.json", "*.safetensors"]


def resolve_model(model: str, *, revision: str | None, cache_dir: Path) -> Path:
    """Return the checkpoint directory of `model`: `tiny` (written below `cache_dir`), a directory, or owner/name.

    A repository is looked up in the hub's own cache and downloaded when it isn't there, which goes on where an
    interrupted download ended and shows its progress. `revision` is for repositories only. Raises `ConfigError`.
    """
    if model == TINY_MODEL:
        return tiny_directory(cache_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{model} is a file; name the directory that holds config.json", path="model.path")
    if path.is_absolute() or not _REPOSITORY.fullmatch(model) or model.startswith("."):
        message = f"{model!r} is no directory and no owner/name of a repository; the built-in model is {TINY_MODEL!r}"
        raise ConfigError(message, path="model.path")
    return _download(model, revision)


def _download(repository: str, revision: str | None) -> Path:
    name = f"{repository} at {revision}" if revision else repository
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS))
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ConfigError(
            f"{name} is not in the hub cache and the hub can't be reached ({_first_line(error)}). "
            "Download it on a machine with a network, or give a local directory",
            path="model.path",
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{name} can't be downloaded: {_first_line(error)}", path="model.path") from None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
