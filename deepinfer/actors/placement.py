"""Where the ranks of a role run: one placement group, always waited for with a deadline, ranks of a node together."""

from __future__ import annotations

import asyncio
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


@dataclass(slots=True, frozen=True)
class Placement:
    """A reserved place for every rank of a role: rank r runs in the bundle `bundle_indexes[r]`."""

    group: PlacementGroup
    resource: str
    bundle_indexes: tuple[int, ...]

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Return the options that put the actor of `rank` into its place."""
        return {
            "num_cpus": 1 if self.resource == "CPU" else 0,
            "num_gpus": 1 if self.resource == "GPU" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundle_indexes[rank]
            ),
        }

    def remove(self) -> None:
        """Give the places back; actors that still run there are killed by Ray."""
        remove_placement_group(self.group)


async def place(
    role: str, *, num_ranks: int, ranks_per_node: int | None, accelerator: str, name: str, timeout_seconds: float
) -> Placement:
    """Reserve places for `num_ranks` ranks, `ranks_per_node` on each node if given, else packed.

    Ranks are numbered by node, so that neighbours share a machine. Raises ConfigError when the cluster is too small,
    ClusterError when what is asked for is not free within `timeout_seconds`; both name what was asked and what is free.
    """
    resource = _RESOURCES[accelerator]
    sizes = _bundle_sizes(num_ranks, ranks_per_node)
    strategy = "PACK" if ranks_per_node is None else "STRICT_SPREAD"
    group = placement_group([{resource: size} for size in sizes], strategy=strategy, name=f"{name}-{role}")
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), timeout_seconds)
    except TimeoutError:
        failure = await asyncio.to_thread(_explain, role, resource, sizes, timeout_seconds)
        remove_placement_group(group)
        raise failure from None
    nodes = placement_group_table(group)["bundles_to_node_id"]
    in_order = sorted(range(len(sizes)), key=lambda bundle: (nodes[bundle], bundle))
    return Placement(group, resource, tuple(bundle for bundle in in_order for _ in range(sizes[bundle])))


def _bundle_sizes(num_ranks: int, ranks_per_node: int | None) -> list[int]:
    """One bundle for each rank, or one for each node's ranks when their number is given."""
    if ranks_per_node is None:
        return [1] * num_ranks
    whole, rest = divmod(num_ranks, ranks_per_node)
    return [ranks_per_node] * whole + ([rest] if rest else [])


def _explain(role: str, resource: str, sizes: list[int], seconds: float) -> ConfigError | ClusterError:
    total = ray.cluster_resources().get(resource, 0.0)
    free = ray.available_resources().get(resource, 0.0)
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    asked = f"{len(sizes)} nodes with {max(sizes)} {resource} each" if max(sizes) > 1 else f"{len(sizes)} {resource}"
    message = (
        f"no place for the {role} ranks within {seconds:g} s: asked for {asked}, "
        f"free are {free:g} of {total:g} {resource} on {num_nodes} node(s)"
    )
    if total < sum(sizes) or num_nodes < (len(sizes) if max(sizes) > 1 else 1):
        return ConfigError(f"{message}; ask for fewer ranks or add nodes", path=f"{role}.ranks")
    return ClusterError(f"{message}; wait until others have finished or ask for fewer ranks")
