"""Which accelerator `auto` means, once this process is connected to Ray."""

from __future__ import annotations

import ray

from deepinfer.config import ClusterConfig, resolve
from deepinfer.launcher.local import RayConnection
from deepinfer.platforms.platform import detect_accelerator


def resolve_here(config: ClusterConfig) -> ClusterConfig:
    """Return `config` resolved for ranks on this machine."""
    return resolve(config, accelerator=config.accelerator if config.accelerator != "auto" else detect_accelerator())


def resolve_for_ray(config: ClusterConfig, connection: RayConnection) -> ClusterConfig:
    """Return `config` resolved for the Ray behind `connection`.

    A private Ray is on this machine. Any other may have its devices elsewhere, and a driver often runs on a node
    without one: then what the nodes offer to Ray counts.
    """
    if connection.folder is not None:
        return resolve_here(config)
    return resolve(config, accelerator="nvidia" if ray.cluster_resources().get("GPU") else "cpu")
