"""Who provides the Ray of a shared engine: this machine, hosts over ssh, or somebody else whose Ray exists already."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.config import ClusterConfig, RayConfig
from deepinfer.errors import ConfigError
from deepinfer.launcher.ray_node import remove_folder, start_local_ray, stop_processes
from deepinfer.launcher.record import ClusterRecord
from deepinfer.launcher.ssh import start_on_hosts, stop_on_hosts


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
