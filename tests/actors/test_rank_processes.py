"""Ending processes that may end by themselves at any time."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from deepinfer.actors.rank_processes import kill_processes, wait_until_gone


def _child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_process_that_has_ended_by_itself_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it ends behind every look at it: then only the signal tells."""
    ended, running = _child(), _child()
    processes = [psutil.Process(child.pid) for child in (ended, running)]
    ended.kill()
    ended.wait()
    monkeypatch.setattr(psutil.Process, "is_running", lambda _: True)
    kill_processes(processes)
    running.wait(timeout=10)


def test_what_is_killed_counts_as_gone_before_its_parent_has_collected_it() -> None:
    child = _child()
    process = psutil.Process(child.pid)
    assert wait_until_gone([process], 0.1) == [process]
    kill_processes([process])
    assert wait_until_gone([process], 10) == []
    child.wait()
