"""A real memory limit for a command: a group of the kernel's, made and removed by root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_SECONDS = 30.0


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[Path]:
    """A group whose processes get `num_bytes` in all; skips the test where this user can't make one."""
    parent, file = (_V1, "memory.limit_in_bytes") if _V1.exists() else (_V2, "memory.max")
    folder = parent / f"deepinfer-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory limit can be set here: {error}")
    try:
        try:
            (folder / file).write_text(str(num_bytes))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        deadline = time.monotonic() + _SECONDS
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        folder.rmdir()


def inside(folder: Path, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in the group."""
    return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh", *command]
