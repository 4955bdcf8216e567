"""The processes of a Ray that has a folder of its own: found, and ended, by that folder."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from deepinfer.actors.rank_processes import wait_until_gone
from deepinfer.launcher.record import ProcessMark, living

_TERM_SECONDS = 5.0
_KILL_SECONDS = 30.0
_CLIENT_SERVER = "ray.util.client.server"


def stop_processes(folder: Path, marks: tuple[ProcessMark, ...]) -> list[str]:
    """End every process of the Ray in `folder`, and the marked ones; return descriptions of those that stayed.

    A process belongs to that Ray when the folder stands in its command line, or when it descends from one of these.
    No other Ray of the machine is touched.
    """
    processes = {process.pid: process for process in (*processes_of(folder), *living(marks))}
    processes.pop(os.getpid(), None)
    for process in processes.values():
        _signal(process, terminate=True)
    alive = wait_until_gone(processes.values(), _TERM_SECONDS)
    alive = list({process.pid: process for process in (*alive, *processes_of(folder))}.values())
    for process in alive:
        _signal(process, terminate=False)
    stayed = []
    for process in wait_until_gone(alive, _KILL_SECONDS):
        with suppress(psutil.NoSuchProcess):
            stayed.append(f"{process.pid} ({process.name()})")
    return stayed


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return every process of the Ray in `folder`, on this machine, and of what runs on it."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if _belongs(process, folder):
                found[process.pid] = process
                found.update({child.pid: child for child in process.children(recursive=True)})
        except psutil.Error:
            continue
    return list(found.values())


def remove_folder(folder: Path) -> None:
    """Remove the folder of a Ray that has been stopped."""
    shutil.rmtree(folder, ignore_errors=True)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    """True for a process of Ray itself; not for someone who reads its logs or has its token for a job."""
    arguments = process.cmdline()
    if any("/ray/" in argument for argument in arguments):
        return any(str(folder) in argument for argument in arguments)
    # The proxy of Ray's own client is the one that has the folder nowhere in its command line.
    return _CLIENT_SERVER in arguments and process.environ().get("RAY_AUTH_TOKEN_PATH") == str(folder / "token")


def _signal(process: psutil.Process, *, terminate: bool) -> None:
    try:
        if terminate:
            process.terminate()
        else:
            process.kill()
    except psutil.NoSuchProcess:
        pass
