"""A Ray on this machine that outlives the process which starts it, and its command lines."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError
from deepinfer.launcher.environment import ray_environment
from deepinfer.launcher.local import make_folder, object_store_bytes, start_patiently, warn_of_small_shared_memory
from deepinfer.launcher.ray_processes import remove_folder, stop_processes
from deepinfer.launcher.record import ClusterRecord
from deepinfer.log import get_logger, phase

_LOGGER = get_logger("launcher")
_FOLDER_PREFIX = "deepinfer-up-"
_START_SECONDS = 180.0
_LOCALHOST = "127.0.0.1"


def start_local_ray(config: ClusterConfig) -> ClusterRecord:
    """Start a Ray with its dashboard on this machine, with a folder, a token and ports of its own.

    Its dashboard listens on this machine's loopback only. A start that Ray gives up for slowness is tried again. Raises
    ClusterError with Ray's own words when it does not come up.
    """
    warn_of_small_shared_memory(config)
    return start_patiently(lambda: _start_local(config))


def _start_local(config: ClusterConfig) -> ClusterRecord:
    folder = make_folder(Path(tempfile.gettempdir()), f"{_FOLDER_PREFIX}{secrets.token_hex(3)}")
    port, dashboard_port, *rest = _free_ports(5)
    port, dashboard_port = config.ray.port or port, config.ray.dashboard_port or dashboard_port
    command = [
        *local_command(config, folder=str(folder), port=port, dashboard_port=dashboard_port),
        f"--dashboard-agent-listen-port={rest[0]}",
        f"--metrics-export-port={rest[1]}",
        f"--ray-client-server-port={rest[2]}",
    ]
    with phase(_LOGGER, f"start Ray in {folder}"):
        _start(command, folder)
    return ClusterRecord(
        name=config.name,
        provider="local",
        address=f"{_LOCALHOST}:{port}",
        dashboard_url=f"http://{_LOCALHOST}:{dashboard_port}",
        token=str(folder / "token"),
        folder=str(folder),
    )


def local_command(config: ClusterConfig, *, folder: str, port: int | str, dashboard_port: int | str) -> list[str]:
    """Return the command line of a Ray on this machine, without the ports that only have to be free."""
    ranks = (config.prefill.ranks or 1) + (config.decode.ranks or 1)
    return [
        *ray_command(sys.executable),
        "start",
        "--head",
        f"--port={port}",
        f"--temp-dir={folder}",
        f"--num-cpus={max(os.cpu_count() or 1, ranks)}",
        f"--object-store-memory={object_store_bytes(config)}",
        "--include-dashboard=true",
        f"--dashboard-port={dashboard_port}",
        "--disable-usage-stats",
    ]


def ray_command(python: str) -> list[str]:
    """Return the beginning of a `ray` command line with the interpreter `python`, which has Ray installed."""
    return [python, "-m", "ray.scripts.scripts"]


def _start(command: list[str], folder: Path) -> None:
    environment = {**os.environ, **{k: v or "" for k, v in ray_environment(folder / "token").items()}}
    environment.pop("RAY_AUTH_TOKEN", None)
    environment.pop("RAY_ADDRESS", None)
    # So that submitted jobs find the commands of this installation.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    with (folder / "start.log").open("wb") as log:
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                timeout=_START_SECONDS, check=False, start_new_session=True,
            )  # fmt: skip
            failure = f"exit code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"no answer within {_START_SECONDS:g} s"
    if failure is not None:
        words = (folder / "start.log").read_text(errors="replace").strip()[-1500:]
        stop_processes(folder, ())
        remove_folder(folder)
        raise ClusterError(f"Ray did not start on this machine ({failure}): {words}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((_LOCALHOST, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
