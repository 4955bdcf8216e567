"""Options, markers and fixtures shared by all tests."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import GOLDEN

# Before torch is imported: threads that wait for each other cost ten times the work on a small, busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        type=Path,
        default=None,
        help="directory with the full golden set (one folder per variant); default: the trimmed set under tests/golden",
    )
    parser.addoption("--memory-rows", type=int, default=4000, help="rows of the memory scenario P11; in full 202000")
    parser.addoption("--cold-starts", type=int, default=2, help="new processes in the start scenario P10; in full 10")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let `-k p04` find a test whose docstring says which real-world fault it guards against ("P04: ...")."""
    docstring = getattr(getattr(item, "function", None), "__doc__", None) or ""
    item.extra_keyword_matches.update(re.findall(r"\bP\d\d\b", docstring))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out to several workers (`-n 2`); without pytest-xdist nobody asks."""
    from tests.support.worker_files import RayOnOneWorker

    return RayOnOneWorker(config, log)


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """The golden set in use: the one of --golden-dir, else the trimmed set of the repository."""
    chosen: Path | None = request.config.getoption("--golden-dir")
    return chosen or GOLDEN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs that this machine lacks; torch is asked only when such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item in marked:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if present < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {present}"))
