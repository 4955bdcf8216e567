"""Where the ranks of a role run: one placement group, always waited for with a deadline, ranks of a node together."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deepinfer.errors import ClusterError, ConfigError

# What one rank takes from Ray, by accelerator.
_RESOURCES = {"cpu": "CPU", "nvidia": "GPU"}
_RAY_PARTS = 10_000  # Ray counts a resource in parts of this size


@dataclass(slots=True, frozen=True)
class Placement:
    """A reserved place for every rank of a role: rank r runs in the bundle `bundle_indexes[r]`.

    A rank takes `share` of a `resource`.
    """

    group: PlacementGroup
    resource: str
    share: float
    bundle_indexes: tuple[int, ...]

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Return the options that put the actor of `rank` into its place."""
        return {
            "num_cpus": self.share if self.resource == "CPU" else 0,
            "num_gpus": self.share if self.resource == "GPU" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundle_indexes[rank]
            ),
        }


async def place(
    role: str,
    *,
    num_ranks: int,
    ranks_per_node: int | None,
    ranks_per_device: int,
    accelerator: str,
    name: str,
    timeout_seconds: float,
    is_detached: bool,
) -> Placement:
    """Reserve places for `num_ranks` ranks, `ranks_per_node` on each node if given, else packed.

    `ranks_per_device` ranks, of this role or another one, share a GPU; a rank always has a CPU of its own. Ranks are
    numbered by node, so that neighbours share a machine. `name` is the group's in Ray; a group that `is_detached`
    outlives the process that asks. Raises ConfigError when the cluster is too small, ClusterError when what is asked
    for is not free within `timeout_seconds`; both name what was asked and what is free.
    """
    resource = _RESOURCES[accelerator]
    share = rank_share(resource, ranks_per_device)
    sizes = _bundle_sizes(num_ranks, ranks_per_node)
    amounts = [bundle_amount(size, share) for size in sizes]
    strategy = "PACK" if ranks_per_node is None else "STRICT_SPREAD"
    group = placement_group(
        [{resource: amount} for amount in amounts],
        strategy=strategy,
        name=name,
        lifetime="detached" if is_detached else None,
    )
    try:
        await _wait(group, role, resource, amounts, timeout_seconds)
    except BaseException:
        remove_placement_group(group)
        raise
    nodes = placement_group_table(group)["bundles_to_node_id"]
    in_order = sorted(range(len(sizes)), key=lambda bundle: (nodes[bundle], bundle))
    return Placement(group, resource, share, tuple(bundle for bundle in in_order for _ in range(sizes[bundle])))


async def _wait(group: PlacementGroup, role: str, resource: str, amounts: list[float], seconds: float) -> None:
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), seconds)
    except TimeoutError:
        raise await asyncio.to_thread(_explain, role, resource, amounts, seconds) from None


def rank_share(resource: str, ranks_per_device: int) -> float:
    """Return what one rank takes, rounded down to what Ray can count, so that all shares of a device fit on it."""
    return 1 if resource == "CPU" else (_RAY_PARTS // ranks_per_device) / _RAY_PARTS


def bundle_amount(num_ranks: int, share: float) -> float:
    """Return what a bundle for `num_ranks` ranks reserves; Ray takes whole devices only, or a part of one."""
    amount = round(num_ranks * share * _RAY_PARTS) / _RAY_PARTS
    return amount if amount < 1 else math.ceil(amount)


def _bundle_sizes(num_ranks: int, ranks_per_node: int | None) -> list[int]:
    """One bundle for each rank, or one for each node's ranks when their number is given."""
    if ranks_per_node is None:
        return [1] * num_ranks
    whole, rest = divmod(num_ranks, ranks_per_node)
    return [ranks_per_node] * whole + ([rest] if rest else [])


def _explain(role: str, resource: str, amounts: list[float], seconds: float) -> ConfigError | ClusterError:
    total = ray.cluster_resources().get(resource, 0.0)
    free = ray.available_resources().get(resource, 0.0)
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    is_spread = max(amounts) > 1
    asked = (
        f"{len(amounts)} nodes with {max(amounts):g} {resource} each" if is_spread else f"{sum(amounts):g} {resource}"
    )
    message = (
        f"no place for the {role} ranks within {seconds:g} s: asked for {asked}, "
        f"free are {free:g} of {total:g} {resource} on {num_nodes} node(s)"
    )
    if is_spread:
        message = f"{message} ({_describe_nodes(resource)})"
    if total < sum(amounts) or num_nodes < (len(amounts) if is_spread else 1):
        return ConfigError(f"{message}; ask for fewer ranks or add nodes", path=f"{role}.ranks")
    return ClusterError(f"{message}; wait until others have finished or ask for fewer ranks")


def _describe_nodes(resource: str) -> str:
    """Say how many nodes have how much of the resource: "2 nodes with 8, 1 node with 4"."""
    amounts = Counter(node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"])
    parts = (f"{count} {'node' if count == 1 else 'nodes'} with {amount:g}" for amount, count in amounts.items())
    return ", ".join(parts)
