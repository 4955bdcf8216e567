"""The host's memory as this process may use it: a container's limit counts like a smaller machine.

Names of the limits: the kernel's documentation of cgroups, version 1 ("memory" controller) and version 2. A process may
stand in a nest of groups, each with a limit of its own, and a container may not see where in the nest it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class HostMemory:
    """In bytes. Cached file pages count as free: the kernel drops them first."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a version of cgroups is mounted, and its names."""

    root: str
    limit: str
    used: str
    file_pages: tuple[str, str]


_V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the least of what the machine and the groups of this process have; `root`: where /proc and /sys are."""
    machine = psutil.virtual_memory()
    known = [HostMemory(machine.total, machine.available), *_limits(root)]
    return HostMemory(min(memory.total_bytes for memory in known), min(memory.free_bytes for memory in known))


def _limits(root: Path) -> Iterator[HostMemory]:
    for version, folder in _groups(root):
        try:
            limit = int((folder / version.limit).read_text())
            used = int((folder / version.used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
        file_pages = sum(int(stat.get(name, 0)) for name in version.file_pages)
        yield HostMemory(limit, max(0, limit - used + file_pages))


def _groups(root: Path) -> Iterable[tuple[_Version, Path]]:
    """Return the folders of the groups in which this process may stand, from the innermost out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = _V1 if "memory" in controllers.split(",") else None if controllers else _V2
        if version is not None:
            top = root / version.root
            inner = top / path.lstrip("/")
            yield from ((version, folder) for folder in (inner, *inner.parents) if folder.is_relative_to(top))
