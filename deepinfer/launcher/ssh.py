"""Ray on a list of hosts, started over ssh: the head first, then all others at once.

This package must be installed on every host, at the same path or with `ray.python`. Our own `ray start` is used because
Ray's launcher leaves workers out and raylets behind on hosts that it does not own.
"""

from __future__ import annotations

import ipaddress
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ray import __version__ as ray_version

from deepinfer import __version__
from deepinfer.actors.domains import DOMAIN_LABEL
from deepinfer.config import ClusterConfig, RayConfig
from deepinfer.errors import ClusterError, ConfigError
from deepinfer.launcher.environment import ray_environment, write_token
from deepinfer.launcher.host_domains import check_domains
from deepinfer.launcher.local import object_store_bytes, start_patiently
from deepinfer.launcher.ray_node import ray_command
from deepinfer.launcher.ray_processes import remove_folder
from deepinfer.launcher.record import ClusterRecord
from deepinfer.log import get_logger, phase

_LOGGER = get_logger("launcher")
_PORT = 6379
_DASHBOARD_PORT = 8265
_COMMAND_SECONDS = 180.0
_Answer = TypeVar("_Answer")
_VERSIONS = "import deepinfer, ray, socket; print(deepinfer.__version__, ray.__version__, socket.gethostname())"
_STOP = (
    "import sys; from pathlib import Path; from deepinfer.launcher.ray_processes import remove_folder, stop_processes; "
    "folder = Path(sys.argv[1]); left = stop_processes(folder, ()); print(chr(10).join(left)); "
    "left or remove_folder(folder)"
)


def start_on_hosts(config: ClusterConfig) -> ClusterRecord:
    """Start Ray on all hosts of `config.ray`. Raises ConfigError and ClusterError that name the host at fault.

    A start that Ray gives up because a host is slow is tried again. What was started before a failure is stopped again.
    """
    hosts = config.ray.hosts
    if not hosts:
        raise ConfigError("provider 'ssh' needs the names of the hosts; the first becomes the head", path="ray.hosts")
    check_domains(config.ray)
    with phase(_LOGGER, f"check {len(hosts)} hosts"):
        _check_versions(config.ray)
    folder = Path("/tmp") / f"deepinfer-up-{secrets.token_hex(3)}"
    folder.mkdir(mode=0o700)
    token = write_token(folder).read_text(encoding="ascii")
    record = host_record(config, folder=str(folder))

    def start(host: str) -> str:
        arguments = host_arguments(config, record, host)
        return start_patiently(lambda: _start(config.ray, host, folder, token, arguments), where=host)

    try:
        with phase(_LOGGER, f"start Ray's head on {hosts[0]}"):
            start(hosts[0])
        with phase(_LOGGER, f"start Ray on {len(hosts) - 1} more hosts"):
            _on_all(hosts[1:], start)
    except BaseException:
        left = stop_on_hosts(record, config.ray)
        if left:
            _LOGGER.warning("not everything that was started could be stopped: %s", ", ".join(left))
        raise
    return record


def host_record(config: ClusterConfig, *, folder: str) -> ClusterRecord:
    """Return the record of a Ray on the hosts of `config`, with its files in `folder` on each."""
    head = _machine(config.ray.hosts[0])
    return ClusterRecord(
        name=config.name,
        provider="ssh",
        address=f"{head}:{config.ray.port or _PORT}",
        dashboard_url=f"http://{head}:{config.ray.dashboard_port or _DASHBOARD_PORT}",
        token=f"{folder}/token",
        folder=folder,
        hosts=config.ray.hosts,
    )


def host_arguments(config: ClusterConfig, record: ClusterRecord, host: str) -> list[str]:
    """Return the arguments of `ray start` on `host`; the first of all hosts becomes the head."""
    labels = [f"--labels={DOMAIN_LABEL}={name}" for name, hosts in config.ray.domains.items() if host in hosts]
    common = [
        *_address_option(host),
        f"--object-store-memory={object_store_bytes(config)}",
        "--disable-usage-stats",
        *labels,
    ]
    if host != config.ray.hosts[0]:
        return [f"--address={record.address}", *common]  # the folder is the head's
    return [
        "--head",
        f"--port={config.ray.port or _PORT}",
        f"--temp-dir={record.folder}",
        "--include-dashboard=true",
        "--dashboard-host=0.0.0.0",
        f"--dashboard-port={config.ray.dashboard_port or _DASHBOARD_PORT}",
        *common,
    ]


def stop_on_hosts(record: ClusterRecord, config: RayConfig) -> list[str]:
    """Stop the Ray of `record` on its hosts, the head last; return what stayed, with the host's name.

    A host that can't be reached is warned of and left to itself: the others have to be stopped all the same.
    """
    assert record.folder is not None
    folder = record.folder
    left: list[str] = []
    for hosts in (record.hosts[1:], record.hosts[:1]):
        for lines in _on_all(hosts, lambda host: _try_stop(config, host, folder)):
            left += lines
    if not left:
        remove_folder(Path(record.folder))  # the token's copy on this machine
    return left


def _check_versions(config: RayConfig) -> None:
    wanted = f"deepinfer {__version__}, ray {ray_version}"
    answers = _on_all(config.hosts, lambda host: _run(config, host, [_python(config), "-c", _VERSIONS]))
    for host, answer in zip(config.hosts, answers, strict=True):
        found = answer.split()
        if found[:2] != [__version__, ray_version]:
            raise ConfigError(f"{host} has deepinfer, ray {' '.join(found[:2])}, here are {wanted}", path="ray.hosts")


def _start(config: RayConfig, host: str, folder: Path, token: str, arguments: Sequence[str]) -> str:
    """Start Ray on `host` with its files in `folder`; raises ClusterError, and leaves nothing there, if it fails."""
    place = shlex.quote(str(folder))
    _run_shell(config, host, f"umask 077 && mkdir -p {place} && cat > {place}/token", text=token)
    variables = [f"{name}={value}" for name, value in ray_environment(folder / "token").items() if value is not None]
    command = ["env", *variables, *ray_command(_python(config)), "start", *arguments]
    try:
        return _run(config, host, command)
    except ClusterError:
        _try_stop(config, host, str(folder))
        raise


def _stop(config: RayConfig, host: str, folder: str) -> str:
    return _run(config, host, [_python(config), "-c", _STOP, folder])


def _try_stop(config: RayConfig, host: str, folder: str) -> list[str]:
    try:
        answer = _stop(config, host, folder)
    except ClusterError as error:
        _LOGGER.warning("nothing was stopped there; a Ray that still runs there ends without its head: %s", error)
        return []
    return [f"{host}: {line}" for line in answer.splitlines() if line.strip()]


def _python(config: RayConfig) -> str:
    return config.python or sys.executable


def _run(config: RayConfig, host: str, command: Sequence[str]) -> str:
    return _run_shell(config, host, shlex.join(command))


def _run_shell(config: RayConfig, host: str, command: str, *, text: str = "") -> str:
    """Run a line of shell on `host` and return what it prints; raises ClusterError with its last words."""
    try:
        done = subprocess.run(
            [*config.ssh_command, host, command], input=text, capture_output=True, text=True,
            timeout=_COMMAND_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"host {host}: {error}") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise ClusterError(f"host {host}: exit code {done.returncode}: {words}")
    return done.stdout


def _on_all(hosts: Sequence[str], work: Callable[[str], _Answer]) -> list[_Answer]:
    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(len(hosts), 32)) as pool:
        return list(pool.map(work, hosts))


def _address_option(host: str) -> list[str]:
    """The address under which the others reach `host`: without it a head takes the one that leads to the internet.

    Left to Ray where this machine has no address of the network for the name, as with a name of ssh's configuration.
    """
    try:
        address = socket.gethostbyname(_machine(host))
    except OSError:
        return []
    return [] if ipaddress.ip_address(address).is_loopback else [f"--node-ip-address={address}"]


def _machine(host: str) -> str:
    """The name under which other hosts reach `host`, which may have a user in front."""
    return host.rpartition("@")[2]
