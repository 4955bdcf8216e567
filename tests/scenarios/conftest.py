"""One engine of the tiny model for the whole folder: one prefill and two decode ranks, real ones.

Its cache holds one longest sequence and little more, so that many rows at once crowd it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_ray import local_ray
from support.tiny_checkpoint import directory
from support.tiny_ranks import smallest_cache

from deepinfer.llm import LLM
from deepinfer.models.deepseek_v41.tiny import tiny_directory

__all__ = ["directory", "local_ray"]

MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with the tiny checkpoint in it."""
    path = tmp_path_factory.mktemp("cache")
    tiny_directory(path)
    return path


@pytest.fixture(scope="session")
def llm(local_ray: None, cache_dir: Path) -> Iterator[LLM]:
    """The shared engine; tests must leave it as they found it."""
    settings = {
        "accelerator": "cpu",
        "prefill.ranks": 1,
        "prefill.max_running": 8,
        "decode.ranks": 2,
        "decode.max_running": 8,
        "model.max_model_len": MAX_MODEL_LEN,
        "cache.block_size": 16,
        "scheduler.publish_seconds": 0.05,
        "speculative.max_draft_tokens": 2,
        "cache_dir": str(cache_dir),
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    settings["cache.memory_bytes"] = smallest_cache(tiny_directory(cache_dir), *lines)
    with LLM("tiny", settings=settings) as engine:
        yield engine
