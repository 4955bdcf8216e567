"""P57: an engine that does not fit the host's memory is refused with the sums, under injected and under real limits."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.memory_limit import inside, memory_limit

from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.errors import ConfigError
from deepinfer.launcher import host_need
from deepinfer.launcher.host_need import check_host
from deepinfer.models.deepseek_v41.tiny import tiny_directory
from deepinfer.platforms.host_memory import HostMemory
from tests.cluster.conftest import Commands

LARGE = ("cache.memory_bytes=600000000", "decode.max_running=1000", "prefill.max_running=1000")
SETTINGS = tuple(part for setting in LARGE for part in ("--set", setting))


def read(file: Path) -> ClusterConfig:
    return resolve(load_config(file, settings=LARGE, environ={}).config, accelerator="cpu")


def needed_bytes(file: Path, *, with_ray: bool) -> int:
    config = read(file)
    return sum(host_need.host_need(config, tiny_directory(Path(config.cache_dir)), with_ray=with_ray).values())


def test_p57_needed_and_free_are_named(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(commands.file)
    directory = tiny_directory(Path(config.cache_dir))
    needed = needed_bytes(commands.file, with_ray=True)
    monkeypatch.setattr(host_need, "host_memory", lambda: HostMemory(total_bytes=2 * needed, free_bytes=needed - 1))
    gib = f"{needed / 2**30:.2f} GiB"
    words = rf"decode\.ranks: the engine needs {gib} of this host's memory \(weights .*, caches .*, processes .*\), "
    with pytest.raises(ConfigError, match=f"{words}{gib} of .* GiB are free; use fewer ranks"):
        check_host(config, directory, with_ray=True)
    check_host(config, directory, with_ray=False)
    monkeypatch.setattr(host_need, "host_memory", lambda: HostMemory(total_bytes=2 * needed, free_bytes=needed))
    check_host(config, directory, with_ray=True)


def run_inside(commands: Commands, folder: Path, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    line = inside(folder, commands.line(command, *arguments))
    environment = commands.environment()
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_p57_up_and_run_refuse_before_they_load_under_a_real_limit(commands: Commands) -> None:
    """At nine tenths of the need both refuse; at half as much again as is needed the job runs."""
    source, target = commands.rows("row", 2), commands.folder / "answers"
    run = ("run", "--cluster", commands.file, *SETTINGS, "-i", source, "-o", target)
    with memory_limit(needed_bytes(commands.file, with_ray=True) * 9 // 10) as folder:
        up = run_inside(commands, folder, "deepinfer-cluster", "up", commands.file, *SETTINGS)
    assert up.returncode == 2, up.stderr
    assert "start Ray" not in up.stderr
    with memory_limit(needed_bytes(commands.file, with_ray=True) * 9 // 10) as folder:
        refused = run_inside(commands, folder, "deepinfer", *run)
    assert refused.returncode == 2, refused.stderr
    assert "loading" not in refused.stderr
    for said in (up.stderr, refused.stderr):
        numbers = re.search(r"needs ([\d.]+) GiB of this host's memory .*, ([\d.]+) GiB of [\d.]+ GiB are free", said)
        assert numbers is not None, said
        assert float(numbers[1]) > float(numbers[2])
    with memory_limit(needed_bytes(commands.file, with_ray=True) * 3 // 2) as folder:
        done = run_inside(commands, folder, "deepinfer", *run)
    assert done.returncode == 0, done.stderr
    assert commands.answered(target) == {"row-0", "row-1"}
