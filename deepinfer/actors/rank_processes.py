"""The processes of ranks on this node, ended by pid: Ray's own kill does not reach one that is frozen.

A process that has ended and was not yet collected by its parent counts as gone: it holds nothing any more, and in a
container whose first process collects nobody it stays for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil
import ray

from deepinfer.actors.rank_life import RankPlace

_POLL_SECONDS = 0.05


def local_processes(places: Iterable[RankPlace]) -> list[psutil.Process]:
    """Return the ranks' processes on this node; the pids of other nodes mean nothing here."""
    here = ray.get_runtime_context().get_node_id()
    found = []
    for place in places:
        if place.node_id == here and place.pid != os.getpid():
            try:
                found.append(psutil.Process(place.pid))
            except psutil.NoSuchProcess:
                continue
    return found


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill those that still run; a later process with the same pid is not touched."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it may end at any time
            process.kill()  # looks at the start time, too


def wait_until_gone(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all have ended, at most for `seconds`; return those that have not."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        processes = left
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
