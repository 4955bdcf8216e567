"""What `deepinfer-cluster up` leaves behind for later commands: where its Ray is, and which processes belong to it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from deepinfer.config import ClusterConfig


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this machine, told apart from a later one with the same pid by the time of its start."""

    pid: int
    created: float


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's Ray. `folder` is set when `up` started that Ray: then `down` stops it, else it is left running.

    `hosts` (ssh) are those on which Ray was started, the head first. `processes`: the ranks on this machine.
    """

    name: str
    provider: str
    address: str
    dashboard_url: str | None = None
    token: str | None = None
    folder: str | None = None
    hosts: tuple[str, ...] = ()
    processes: tuple[ProcessMark, ...] = ()


def read_record(config: ClusterConfig) -> ClusterRecord | None:
    """Return the record of the engine `config.name`, None when there is none. `config` is resolved."""
    try:
        return msgspec.json.decode(_path(config).read_bytes(), type=ClusterRecord)
    except FileNotFoundError:
        return None


def write_record(config: ClusterConfig, record: ClusterRecord) -> None:
    """Replace the record of the engine `config.name`."""
    path = _path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    new.replace(path)


def remove_record(config: ClusterConfig) -> None:
    """Forget the engine `config.name`."""
    _path(config).unlink(missing_ok=True)


def mark_processes(processes: Iterable[tuple[str, int]]) -> tuple[ProcessMark, ...]:
    """Return marks of those `processes`, each a machine's name and a pid there, that live on this machine."""
    found = []
    for pid in (pid for node, pid in processes if node == platform.node()):
        try:
            found.append(ProcessMark(pid=pid, created=psutil.Process(pid).create_time()))
        except psutil.NoSuchProcess:
            continue
    return tuple(found)


def living(marks: Iterable[ProcessMark]) -> list[psutil.Process]:
    """Return the marked processes that are still there."""
    processes = []
    for mark in marks:
        try:
            process = psutil.Process(mark.pid)
            if process.create_time() == mark.created:
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


def _path(config: ClusterConfig) -> Path:
    return Path(config.cache_dir) / "clusters" / f"{config.name}.json"
