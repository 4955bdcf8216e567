"""Whether the ranks of all roles together can have places at all, told before any of them is started."""

from __future__ import annotations

import ray

from deepinfer.actors.placement import RESOURCES, bundle_amount, bundle_sizes, rank_share
from deepinfer.config import ClusterConfig
from deepinfer.errors import ConfigError

_MAX_SHARING = 16  # ranks of one device that are worth a proposal


def check_places(config: ClusterConfig) -> None:
    """Raise ConfigError, with a cure, when the nodes that Ray has now can't hold the ranks of `config` (resolved).

    Others who use the same nodes are not counted: their places become free.
    """
    resource = RESOURCES[config.accelerator]
    lack = describe_lack(config, ray.cluster_resources().get(resource, 0.0))
    if lack is not None:
        raise ConfigError(lack, path="ranks_per_device" if resource == "GPU" else "decode.ranks")


def describe_lack(config: ClusterConfig, total: float) -> str | None:
    """Say what all ranks ask for, that `total` of their resource is less, and what helps; None when it is enough."""
    resource, sharing = RESOURCES[config.accelerator], config.ranks_per_device or 1
    needed = _needed(config, resource, sharing)
    if needed <= total:
        return None
    ranks = f"{config.prefill.ranks} prefill and {config.decode.ranks} decode ranks"
    asked = f"{ranks} ask for {needed:g} {resource}, all nodes together have {total:g}"
    if resource == "CPU":
        return f"{asked}; use fewer ranks or add nodes"
    cures = (other for other in range(sharing + 1, _MAX_SHARING + 1) if _needed(config, resource, other) <= total)
    enough = next(cures, None)
    if enough is None:
        return f"{asked}; use fewer ranks or more GPUs"
    return f"{asked}; set {enough}, so that as many ranks of either role share one and its memory, or use more GPUs"


def _needed(config: ClusterConfig, resource: str, ranks_per_device: int) -> float:
    share = rank_share(resource, ranks_per_device)
    return sum(
        bundle_amount(size, share)
        for section in (config.prefill, config.decode)
        for size in bundle_sizes(section.ranks or 1, section.ranks_per_node)
    )
