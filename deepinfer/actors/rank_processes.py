"""The processes of ranks on this node, ended by pid: Ray's own kill does not reach one that is frozen."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import psutil
import ray

from deepinfer.actors.rank_life import RankPlace


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
        if process.is_running():  # same pid and same start time
            process.send_signal(signal.SIGKILL)
