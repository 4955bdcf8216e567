"""Architecture name of a checkpoint -> the module that builds its `ModelSpec`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Final

from deepinfer.config import DEFAULT_MODEL
from deepinfer.errors import CheckpointError
from deepinfer.models.model_spec import ModelSpec

# `architectures` entry of config.json -> module with `build_spec(directory)`
_MODULES: Final = {"DeepseekV41ForCausalLM": "deepinfer.models.deepseek_v41.spec"}
# repository whose sizes are known without its files -> module with `build_released_spec()`
_RELEASED: Final = {DEFAULT_MODEL: "deepinfer.models.deepseek_v41.spec"}


def load_spec(directory: Path) -> ModelSpec:
    """Return the spec of the checkpoint in `directory`; raises `CheckpointError` for an unknown architecture."""
    path = directory / "config.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("architectures")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read as a model configuration: {error}") from None
    known = [name for name in names if name in _MODULES] if isinstance(names, list) else []
    if not known:
        raise CheckpointError(f"{path}: architectures {names!r} are not supported; supported are {sorted(_MODULES)}")
    spec: ModelSpec = importlib.import_module(_MODULES[known[0]]).build_spec(directory)
    return spec


def released_spec(repository: str) -> ModelSpec | None:
    """Return the spec of a released model without looking for its files; None when its sizes are not known here."""
    module = _RELEASED.get(repository)
    if module is None:
        return None
    spec: ModelSpec = importlib.import_module(module).build_released_spec()
    return spec
