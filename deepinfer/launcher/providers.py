"""Who provides the Ray of a shared engine: this machine, hosts over ssh, or somebody else whose Ray exists already."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from deepinfer.config import ClusterConfig, RayConfig
from deepinfer.errors import ConfigError
from deepinfer.launcher.host_domains import check_domains
from deepinfer.launcher.ray_node import (
    local_command,
    ray_command,
    start_local_ray,
)
from deepinfer.launcher.ray_processes import remove_folder, stop_processes
from deepinfer.launcher.record import ClusterRecord
from deepinfer.launcher.ssh import host_arguments, host_record, start_on_hosts, stop_on_hosts


def start_ray(config: ClusterConfig) -> ClusterRecord:
    """Start the Ray of `config`, or find the one that exists. Raises ConfigError and ClusterError."""
    if config.ray.provider == "ssh":
        return start_on_hosts(config)
    if config.ray.provider == "kuberay":
        raise ConfigError(
            "'kuberay' is brought up by Kubernetes: `deepinfer-cluster render CONFIG --format kuberay | kubectl apply "
            "-f -`, then use provider 'existing' inside of it",
            path="ray.provider",
        )
    address = config.ray.address
    if config.ray.provider == "existing" and not address:
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            raise ConfigError("provider 'existing' needs the address of a running Ray", path="ray.address")
    if address:
        return ClusterRecord(name=config.name, provider="existing", address=address)
    return start_local_ray(config)


def render_ray(config: ClusterConfig) -> str:
    """Return the commands with which `up` starts the Ray of `config`, one a line; none when it exists already."""
    if config.ray.provider == "ssh":
        check_domains(config.ray)
        record = host_record(config, folder="/tmp/deepinfer-up-ID")
        python = config.ray.python or sys.executable
        lines = []
        for host in config.ray.hosts:
            arguments = host_arguments(config, record, host)
            lines.append(shlex.join([*config.ray.ssh_command, host, *ray_command(python), "start", *arguments]))
        return "".join(f"{line}\n" for line in lines)
    if config.ray.provider == "local" and not config.ray.address:
        ports = (config.ray.port or "FREE", config.ray.dashboard_port or "FREE")
        command = local_command(config, folder="/tmp/deepinfer-up-ID", port=ports[0], dashboard_port=ports[1])
        return f"{shlex.join(command)}\n"
    return f"# the Ray at {config.ray.address or 'RAY_ADDRESS'} exists already\n"


def stop_ray(record: ClusterRecord, config: RayConfig) -> list[str]:
    """Stop the Ray that `start_ray` started, and no other; return descriptions of processes that stayed."""
    if record.folder is None:
        return []
    if record.provider == "ssh":
        return stop_on_hosts(record, config)
    folder = Path(record.folder)
    leftovers = stop_processes(folder, record.processes)
    if not leftovers:
        remove_folder(folder)
    return leftovers
