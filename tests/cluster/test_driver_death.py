"""The driver of a shared engine is killed (real commands, tiny model): ranks stay, no row is lost or doubled."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import Commands, processes_in
from tests.support.pids import runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def wait_until(is_so: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_killed_in_a_job_the_next_run_goes_on_with_the_same_ranks(commands: Commands) -> None:
    printed = commands("deepinfer-cluster", "up", commands.file)
    folder = re.search(r"RAY_AUTH_TOKEN_PATH=(\S+)/token", printed)[1]
    before = commands.status()
    source, target = commands.rows("row", 40, max_tokens=60), commands.folder / "answers"
    run = ("deepinfer", "run", "--cluster", commands.file, "-i", source, "-o", target)
    job = subprocess.Popen(
        commands.line(*run), env=commands.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: target.exists() and len(commands.answered(target)) > 3)
    os.kill(before["pid"], signal.SIGKILL)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 1, said
    assert "the driver has failed: its process has died" in said
    assert "run the same command again to go on" in said
    num_answered = len(commands.answered(target))
    assert 3 < num_answered < 40

    orphaned = commands.status()
    assert orphaned["state"] == "without a driver"
    assert "2 ranks wait for a new one" in orphaned["fatal"]
    log = commands(*run)
    assert "a new one takes over its 2 ranks" in log
    assert log.splitlines()[-1] == "deepinfer: exit code 0"
    assert len(commands.answered(target)) == 40, "each row has one line"
    after = commands.status()
    assert after["ranks"] == before["ranks"], "no rank was started or loaded again"
    assert after["pid"] != before["pid"]
    assert after["requests"]["num_finished"] == 40 - num_answered

    os.kill(after["pid"], signal.SIGKILL)
    assert "is ready: 2 ranks" in commands("deepinfer-cluster", "up", commands.file)
    again = commands.status()
    assert (again["state"], again["ranks"], again["epoch"]) == ("ready", before["ranks"], 3)

    os.kill(again["pid"], signal.SIGKILL)
    assert "is down" in commands("deepinfer-cluster", "down", commands.file)
    assert not [rank["pid"] for rank in before["ranks"].values() if runs(rank["pid"])]
    assert processes_in(folder) == []


@pytest.mark.timeout(900)
def test_other_settings_are_refused_to_a_job_and_loaded_by_up(commands: Commands) -> None:
    commands("deepinfer-cluster", "up", commands.file)
    before = commands.status()
    os.kill(before["pid"], signal.SIGKILL)
    source = commands.rows("row", 2)
    other = ("--set", "decode.max_running=3")
    said = commands(
        "deepinfer", "run", "--cluster", commands.file, *other, "-i", source, "-o", commands.folder / "a", code=2
    )
    assert "decode.max_running: the engine has 8, this job asks for 3" in said
    assert runs(before["ranks"]["decode-0"]["pid"])
    said = commands("deepinfer-cluster", "up", commands.file, *other)
    assert "the ranks of the last driver are ended and started again" in said
    assert "decode.max_running: the engine has 8, this job asks for 3" in said
    after = commands.status()
    assert after["ranks"].keys() == before["ranks"].keys()
    assert not {rank["pid"] for rank in before["ranks"].values()} & {rank["pid"] for rank in after["ranks"].values()}
    commands("deepinfer-cluster", "down", commands.file)


def kill_three_times(commands: Commands, rank: str, job: subprocess.Popen[str]) -> None:
    """Kill a rank in the job, and those that replace it."""
    wait_until(lambda: bool(commands.status().get("jobs")) or job.poll() is not None)
    killed: set[int] = set()
    while job.poll() is None and len(killed) < 3:
        pid = commands.status().get("ranks", {}).get(rank, {}).get("pid")
        if pid is not None and pid not in killed and runs(pid):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.5)


@pytest.mark.timeout(900)
def test_the_cause_of_a_rank_s_death_is_in_a_submitted_job_s_output(commands: Commands) -> None:
    """P60: the submit command shows which rank died of what, how many rows are done, and how to go on."""
    printed = commands("deepinfer-cluster", "up", commands.file)
    source = commands.rows("long", 30, max_tokens=400)
    with commands.submit(printed, "-i", source, "-o", commands.folder / "answers") as job:
        try:
            kill_three_times(commands, "decode-0", job)
            said = job.communicate(timeout=300)[0]
        finally:
            job.kill()
    assert job.returncode == 1, said
    assert re.search(r"decode rank 0: (ended in \w+: )?its process has died", said), said
    assert "the group was restarted 2 times before, giving up" in said, said
    assert "run the same command again to go on" in said
    assert "deepinfer: exit code 1" in said
