"""The tiny checkpoint, written once for all tests of a process, which leave it as it is; for a folder's conftest."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.models.deepseek_v41.tiny import tiny_directory


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory."""
    return tiny_directory(tmp_path_factory.mktemp("tiny"))
