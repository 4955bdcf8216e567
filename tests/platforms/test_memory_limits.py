"""The memory that a process may use, with limits of containers written into a folder, and with a real one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from deepinfer.platforms.host_memory import host_memory

NO_LIMIT = 2**63 - 4096  # how version 1 writes it


def write_group(folder: Path, version: int, limit: int | str, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    total = "total_" if version == 1 else ""
    (folder / "memory.stat").write_text(f"{total}anon 500\n{total}inactive_file 100\n{total}active_file 50\n")


def stand_in(root: Path, lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_without_limits_it_is_the_machine_s(tmp_path: Path) -> None:
    machine = psutil.virtual_memory()
    stand_in(tmp_path, "4:memory:/a\n0::/a\n")
    write_group(tmp_path / "sys/fs/cgroup/memory/a", 1, NO_LIMIT, 700)
    write_group(tmp_path / "sys/fs/cgroup/a", 2, "max", 700)
    for root in (tmp_path, tmp_path / "without"):
        memory = host_memory(root)
        assert memory.total_bytes == machine.total
        assert memory.free_bytes == pytest.approx(machine.available, rel=0.2)


@pytest.mark.parametrize(
    ("version", "lines"), [(1, "9:cpu:/elsewhere\n4:hugetlb,memory:/outer/inner\n0::/\n"), (2, "0::/outer/inner\n")]
)
def test_the_narrowest_group_counts(tmp_path: Path, version: int, lines: str) -> None:
    """The inner group allows more than the one around it."""
    stand_in(tmp_path, lines)
    top = tmp_path / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    write_group(top / "outer/inner", version, 5000, 200)
    write_group(top / "outer", version, 1000, 700)
    write_group(tmp_path / "sys/fs/cgroup/cpu/elsewhere", version, 1, 1)
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (1000, 450)


def test_a_container_that_does_not_see_its_place_has_the_outermost_limit(tmp_path: Path) -> None:
    stand_in(tmp_path, "0::/docker/0123\n")
    write_group(tmp_path / "sys/fs/cgroup", 2, 1000, 990)
    assert host_memory(tmp_path).free_bytes == 160
    write_group(tmp_path / "sys/fs/cgroup", 2, 1000, 1300)
    assert host_memory(tmp_path).free_bytes == 0
