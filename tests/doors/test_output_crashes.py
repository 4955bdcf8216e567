"""P12: an output survives a death at any point, each row once."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer.batch_file.local_output import LocalOutput
from deepinfer.batch_file.state import StateFile
from deepinfer.errors import ClusterError
from tests.doors.batch_files import read_rows, row, run, write_rows
from tests.doors.echo_engine import EchoEngine

ROOT = Path(__file__).parent.parent.parent


class Death(BaseException):
    """Stands for the end of the process: nothing of ours may catch it, and no later write reaches a file."""


class DyingDisk:
    """Replaces the calls that change files. After `num_calls` of them every one raises, the first halfway done."""

    _CHANGES = ("write", "ftruncate", "truncate", "replace", "unlink", "fsync")

    def __init__(self, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = num_calls
        for name in self._CHANGES:
            monkeypatch.setattr(os, name, self._dying(name, getattr(os, name)))
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # a dead process holds no lock, this one would

    def _dying(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left >= 0:
                return real(*arguments, **options)
            if name == "write" and self.left == -1:
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            raise Death

        return call


def _check(target: Path, num_rows: int) -> None:
    lines = read_rows(target)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{i}" for i in range(num_rows))
    assert all(line["error"] is None for line in lines)


def _whole_lines(target: Path) -> list[bytes]:
    return [line for line in target.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize("retry_failed", [False, True])
def test_death_at_every_single_call(tmp_path: Path, retry_failed: bool) -> None:
    """With `retry_failed` the job that dies redoes two error rows, whose old lines may go only for new ones."""
    rows = [row(f"r{i}", "again?" if i in (1, 3) else f"p{i}") for i in range(5)]
    source = write_rows(tmp_path / "in", rows)
    num_calls, died = 0, True
    while died:
        target = tmp_path / str(num_calls) / "out"
        target.parent.mkdir()
        if retry_failed:
            run(source, target, EchoEngine(fail_first_try="?"))
        died = False
        with pytest.MonkeyPatch.context() as patch:
            DyingDisk(num_calls, patch)
            try:
                run(source, target, retry_failed=retry_failed)
            except Death:
                died = True
        before = _whole_lines(target) if target.exists() else []
        if retry_failed:
            assert len(before) == 5, num_calls
        engine = EchoEngine()
        run(source, target, engine, retry_failed=retry_failed)
        _check(target, 5)
        answered_before = [line for line in before if b'"error":null' in line]
        assert set(answered_before) <= set(_whole_lines(target)), num_calls
        assert not target.with_name("out.retry").exists()
        num_calls += 1
    assert num_calls > 10


def test_a_disk_that_failed_once_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports a failed write-back once; a sync that succeeds after it brings nothing back."""

    def fail(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    output = LocalOutput(tmp_path / "out", model_digest="d", settings={}, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        output.write(1, bytes(16), b"{}\n")
        output._syncer.join(timeout=30)
    with pytest.raises(ClusterError, match="Input/output error"):
        output.close(True)
    StateFile(tmp_path / "out.state", output=tmp_path / "out").close()  # the lock is free


_JOB = """
import sys
from pathlib import Path
from tests.doors.batch_files import run
from tests.doors.echo_engine import EchoEngine
run(sys.argv[1], sys.argv[2], EchoEngine(delay_seconds=0.002))
"""


@pytest.mark.timeout(60)
def test_kill_minus_nine_again_and_again(tmp_path: Path) -> None:
    num_rows, chance = 400, random.Random(5)
    source = write_rows(tmp_path / "in", [row(f"r{i}", f"p{i} " + "x" * (i % 50)) for i in range(num_rows)])
    target, num_kills, kept = tmp_path / "out", 0, set[bytes]()
    while True:
        process = subprocess.Popen([sys.executable, "-c", _JOB, str(source), str(target)], cwd=ROOT)
        grown = target.stat().st_size if target.exists() else 0
        deadline = time.monotonic() + 30
        while process.poll() is None and (target.stat().st_size if target.exists() else 0) == grown:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        num_kills += 1
        whole = _whole_lines(target)
        assert kept <= set(whole)  # what was written before is still there
        kept = set(whole)
    assert num_kills >= 3
    _check(target, num_rows)
