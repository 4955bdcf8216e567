"""The local provider with real processes: one engine, many jobs, nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Commands, processes_in
from tests.support.pids import runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_up_run_run_down(commands: Commands) -> None:
    printed = commands("deepinfer-cluster", "up", commands.file)
    assert re.search(r"(prefill|decode)-0: loading (code|weights)", printed)
    folder = re.search(r"RAY_AUTH_TOKEN_PATH=(\S+)/token", printed)[1]
    assert "ray job submit --address http://127.0.0.1:" in printed
    before = commands.status()
    assert before["state"] == "ready"
    source = commands.rows("a", 5)
    for name in ("first", "second"):
        log = commands("deepinfer", "run", "--cluster", commands.file, "-i", source, "-o", commands.folder / name)
        assert "using the running engine" in log
        assert log.splitlines()[-1] == "deepinfer: exit code 0"
        assert len(commands.answered(commands.folder / name)) == 5
    other = commands(
        "deepinfer", "run", "--cluster", commands.file, "--set", "decode.max_running=3", "-i", source,
        "-o", commands.folder / "third", code=2,
    )  # fmt: skip
    assert "decode.max_running: the engine has 8, this job asks for 3" in other
    after = commands.status()
    assert after["ranks"] == before["ranks"], "the ranks and their loads must be the same after two jobs"
    assert after["requests"]["num_finished"] == 10
    assert after["jobs"] == {}
    processes = psutil.pids()
    assert before["ranks"]["decode-0"]["pid"] in processes
    assert "is down" in commands("deepinfer-cluster", "down", commands.file)
    assert not runs(before["ranks"]["decode-0"]["pid"])
    assert processes_in(folder) == []
    assert not Path(folder).exists()
    assert commands.status()["state"] == "down"


@pytest.mark.timeout(600)
def test_submitted_jobs_share_the_engine_and_dead_ones_free_it(commands: Commands) -> None:
    """P60 and the exit codes: what a user sees of a job, and that a killed one leaves nothing in the engine."""
    printed = commands("deepinfer-cluster", "up", commands.file)
    before = commands.status()["ranks"]
    bad = commands.rows("bad", 4, temprature=1)
    sources = {"good": commands.rows("good", 12), "bad": bad}
    jobs = [commands.submit(printed, "-i", source, "-o", commands.folder / name) for name, source in sources.items()]
    good, failing = (job.communicate(timeout=200)[0] for job in jobs)
    assert [job.returncode for job in jobs] == [0, 1], (good, failing)
    assert "deepinfer: exit code 0" in good
    assert "deepinfer: exit code 3" in failing
    assert "failed with exit code 3" in failing
    assert "temprature" in failing
    assert "\r" not in good
    assert len(commands.answered(commands.folder / "good")) == 12

    target = commands.folder / "killed"
    source = commands.rows("killed", 60, max_tokens=200)
    line = commands.line("deepinfer", "run", "--cluster", commands.file, "-i", source, "-o", target)
    client = subprocess.Popen(line, env=commands.environment(), stderr=subprocess.DEVNULL)
    while not commands.status()["jobs"]:
        assert client.poll() is None
    client.send_signal(signal.SIGKILL)
    client.wait()
    deadline = time.monotonic() + 30
    while commands.status()["jobs"]:
        assert time.monotonic() < deadline, "the requests of a killed job must be given up"
    assert commands.status()["ranks"] == before

    assert "decode-0: " in commands("deepinfer-cluster", "logs", commands.file, "--rank", "0")
    commands("deepinfer-cluster", "down", commands.file)


@pytest.mark.timeout(600)
def test_a_submitted_job_brings_its_rows_in_its_working_directory(commands: Commands) -> None:
    """The package is on the node, the rows travel; the answers stay where an absolute path says."""
    printed = commands("deepinfer-cluster", "up", commands.file)
    travelling = commands.folder / "travelling"
    travelling.mkdir()
    commands.rows("row", 3).rename(travelling / "rows.jsonl")
    target = commands.folder / "answers"
    options = ("--working-dir", str(travelling))
    with commands.submit(printed, "-i", "rows.jsonl", "-o", target, options=options) as job:
        said = job.communicate(timeout=300)[0]
    assert job.returncode == 0, said
    assert "using the running engine" in said
    assert commands.answered(target) == {"row-0", "row-1", "row-2"}
    commands("deepinfer-cluster", "down", commands.file)
