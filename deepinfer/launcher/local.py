"""A private Ray on this machine, or a connection to one that is already there.

A private Ray belongs to the process that started it: it has its own token and its own folder, and it dies with that
process, however the process ends. Everything about it is set here explicitly, so that a Ray of the same user beside it
is neither seen nor disturbed.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray

from deepinfer.config import ClusterConfig, RayConfig
from deepinfer.errors import ClusterError, ConfigError
from deepinfer.launcher.environment import ray_environment, set_environment, token_environment, write_token
from deepinfer.launcher.ray_processes import stop_processes
from deepinfer.launcher.record import ClusterRecord, read_record
from deepinfer.log import get_logger, phase

_LOGGER = get_logger("launcher")
_FOLDER_PREFIX = "deepinfer-ray-"
_SHARED_MEMORY = Path("/dev/shm")
# Room in the object store for ordinary messages beside the hand-overs.
_MESSAGE_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 5.0
# Unix sockets stand below the folder, and their paths may have 107 bytes; Ray itself adds up to 70.
_MAX_FOLDER_BYTES = 36
# Ray gives its node half a minute to register, whatever is asked for, and then says this.
_SLOW_START = "timed out during startup"
_MAX_SLOW_STARTS = 2
_Started = TypeVar("_Started")


@dataclass
class RayConnection:
    """This process's connection to Ray. `close` undoes what `open_ray` did and nothing else; it may be called twice."""

    connected: bool
    folder: Path | None = None
    replaced: dict[str, str | None] = field(default_factory=dict)

    def close(self) -> None:
        """Disconnect, stop a private Ray with all its processes, remove its folder, restore the environment."""
        if self.connected and ray.is_initialized():
            ray.shutdown()
        self.connected = False
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
        set_environment(self.replaced)
        self.replaced = {}


def open_ray(config: ClusterConfig, *, attach: bool = False) -> RayConnection:
    """Connect this process to Ray and return the connection.

    A Ray that this process already uses is taken as it is, and left so. Else `ray.address`, or the address that
    `ray job submit` hands to its jobs, is attached to; with `attach` also the Ray that `deepinfer-cluster up` has
    recorded for `config.name`. Else a private Ray is started, large enough for the ranks of `config` (resolved).
    Raises ClusterError when Ray can't be reached or started.
    """
    if ray.is_initialized():
        _LOGGER.info("using the Ray that this process is connected to")
        return RayConnection(connected=False)
    record = read_record(config) if attach else None
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if address and (record is None or record.address != address):
        return attach_ray(address, config.ray)
    if record is not None and is_reachable(record.address):
        return attach_recorded(record, config.ray)
    if config.ray.provider != "local":
        raise ConfigError(
            f"provider {config.ray.provider!r} needs a running Ray: bring it up with deepinfer-cluster, or set "
            "ray.address",
            path="ray.provider",
        )
    return start_patiently(lambda: _start_private(config))


def start_patiently(start: Callable[[], _Started], *, where: str = "this machine") -> _Started:
    """Return what `start` returns; while Ray gives up because the machine is slow, try again, twice at most."""
    for _ in range(_MAX_SLOW_STARTS):
        try:
            return start()
        except ClusterError as error:
            if _SLOW_START not in str(error):
                raise
            _LOGGER.warning("Ray's node was not up within Ray's own limit of 30 s, so %s is busy: once more", where)
    return start()


def attach_recorded(record: ClusterRecord, config: RayConfig) -> RayConnection:
    """Connect to a Ray that `deepinfer-cluster up` has started or found."""
    replaced = set_environment(token_environment(Path(record.token))) if record.token else {}
    try:
        connection = attach_ray(record.address, config)
    except BaseException:
        set_environment(replaced)
        raise
    connection.replaced = replaced
    return connection


def attach_ray(address: str, config: RayConfig) -> RayConnection:
    """Connect to the Ray at `address`; raises ClusterError when it can't be reached."""
    with phase(_LOGGER, f"attach to Ray at {address}"):
        _check_reachable(address)
        try:
            _init_ray(address=address, namespace=config.namespace)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"can't reach Ray at {address}: {error}; check ray.address and RAY_ADDRESS") from error
    return RayConnection(connected=True)


def is_reachable(address: str) -> bool:
    """True when somebody listens at `address`."""
    try:
        _check_reachable(address)
    except ClusterError:
        return False
    return True


def _check_reachable(address: str) -> None:
    """Raise ClusterError at once when nobody listens there: Ray itself would try for minutes. "auto" is left to Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(f"can't reach Ray at {address}: {error}; check ray.address and RAY_ADDRESS") from error


def _start_private(config: ClusterConfig) -> RayConnection:
    ranks = (config.prefill.ranks or 1) + (config.decode.ranks or 1)
    parent = Path(config.ray.temp_dir or tempfile.gettempdir())
    _remove_stale_folders(parent)
    warn_of_small_shared_memory(config)
    folder = make_folder(parent, f"{_FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(2)}")
    replaced = set_environment(ray_environment(folder / "token"))
    connection = RayConnection(connected=True, folder=folder, replaced=replaced)
    try:
        with phase(_LOGGER, f"start a private Ray in {folder}"):
            _init_ray(
                address="local",
                num_cpus=max(os.cpu_count() or 1, ranks),
                namespace=config.ray.namespace,
                object_store_memory=object_store_bytes(config),
                include_dashboard=config.ray.dashboard,
                _temp_dir=str(folder),
            )
    except BaseException as error:
        stop_processes(folder, ())
        connection.close()
        if not isinstance(error, Exception):
            raise
        _forget_processes(error)
        raise ClusterError(f"Ray did not start on this machine: {error}") from error
    return connection


def _init_ray(**options: Any) -> None:
    """Call `ray.init`, and leave the process the handler of SIGTERM that it has: Ray sets its own, which aborts."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except SystemExit as end:  # Ray's own answer to the signal while it starts
        if end.code != signal.SIGTERM or not callable(handler):
            raise
        handler(signal.SIGTERM, None)
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _forget_processes(error: BaseException | None) -> None:
    """Let go of what Ray held when it failed with `error`.

    That includes its handles of processes, which were ended behind its back: they would warn, at some later time, that
    nobody has waited for them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        while error is not None:
            error.__traceback__ = None
            error = error.__context__
        gc.collect()


def make_folder(parent: Path, name: str) -> Path:
    """Make the folder `name` of a Ray, with its token, in `parent` or, where paths would become too long, in /tmp."""
    folder = parent / name
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        folder = Path("/tmp") / folder.name
    folder.mkdir(mode=0o700, parents=True)
    write_token(folder)
    return folder


def _remove_stale_folders(parent: Path) -> None:
    """Remove folders of private Rays whose process was killed before it could do so itself."""
    for folder in {*parent.glob(f"{_FOLDER_PREFIX}*"), *Path("/tmp").glob(f"{_FOLDER_PREFIX}*")}:
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def object_store_bytes(config: ClusterConfig) -> int:
    """One and a half times the hand-overs in flight, so that fragmentation never makes Ray spill them to disk."""
    return config.ray.object_store_bytes or config.scheduler.max_kv_bytes_in_flight * 3 // 2 + _MESSAGE_BYTES


def warn_of_small_shared_memory(config: ClusterConfig) -> None:
    """Say so when this machine's shared memory can't hold the object store."""
    wanted = object_store_bytes(config)
    if _SHARED_MEMORY.exists() and (free := shutil.disk_usage(_SHARED_MEMORY).free) < wanted:
        _LOGGER.warning(
            "%s has %d MiB free, the object store wants %d MiB: Ray will use slower files; "
            "enlarge it or lower scheduler.max_kv_bytes_in_flight",
            _SHARED_MEMORY,
            free >> 20,
            wanted >> 20,
        )
