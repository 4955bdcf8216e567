"""Where the ranks of a role run: one placement group, always waited for with a deadline.

Ranks of a node stand together, and so do those of a scale-up domain, where nodes are labelled with theirs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray's public interfaces know totals of nodes only
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deepinfer.actors.domains import DOMAIN_LABEL, Domain, choose_domains, group_domains
from deepinfer.errors import ClusterError, ConfigError
from deepinfer.log import get_logger

# What one rank takes from Ray, by accelerator.
RESOURCES = {"cpu": "CPU", "nvidia": "GPU"}
_RAY_PARTS = 10_000  # Ray counts a resource in parts of this size
# Two roles that start side by side may choose the same free places: the one left out chooses again after this time.
_CHOICE_SECONDS = 5.0
_LOGGER = get_logger("placement")


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


@dataclass(slots=True, frozen=True)
class _Request:
    """What is asked of Ray: one bundle of `resource` for each of `amounts`, each on a node of its own or packed."""

    role: str
    resource: str
    amounts: tuple[float, ...]
    is_spread: bool
    name: str
    is_detached: bool


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

    Where nodes are labelled with their scale-up domain, one domain gets all ranks if it can hold them, else domains are
    filled one after the other. `ranks_per_device` ranks, of this role or another one, share a GPU; a rank always has a
    CPU of its own. Ranks are numbered by domain and node, so that neighbours share a machine. `name` is the group's in
    Ray; a group that `is_detached` outlives the process that asks. Raises ConfigError when the cluster is too small,
    ClusterError when what is asked for is not free within `timeout_seconds`; both name what was asked and what is free.
    """
    resource = RESOURCES[accelerator]
    share = rank_share(resource, ranks_per_device)
    sizes = bundle_sizes(num_ranks, ranks_per_node)
    amounts = tuple(bundle_amount(size, share) for size in sizes)
    request = _Request(role, resource, amounts, ranks_per_node is not None, name, is_detached)
    group, domains = await _reserve(request, timeout_seconds)
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(domains))
    in_order = sorted(
        range(len(sizes)),
        key=lambda bundle: (order.index(domains[bundle]) if domains else 0, nodes[bundle], bundle),
    )
    return Placement(group, resource, share, tuple(bundle for bundle in in_order for _ in range(sizes[bundle])))


async def _reserve(request: _Request, seconds: float) -> tuple[PlacementGroup, list[Domain]]:
    """Return a placement group that has its places, and the domain of each bundle (none where no node has a label)."""
    deadline = time.monotonic() + seconds
    while True:
        domains = await asyncio.to_thread(_read_domains, request.resource)
        chosen = choose_domains(domains, request.amounts, one_per_node=request.is_spread) if domains else []
        left = deadline - time.monotonic()
        if chosen is not None:
            group = _ask(request, chosen)
            try:
                is_placed = await _is_placed(group, min(left, _CHOICE_SECONDS) if chosen else left)
            except BaseException:
                remove_placement_group(group)
                raise
            if is_placed:
                _say_spread(request, chosen)
                return group, chosen
            remove_placement_group(group)
        elif left > 0:
            await asyncio.sleep(min(left, 1.0))
        if time.monotonic() >= deadline:
            raise await asyncio.to_thread(_explain, request, domains, seconds)


def _ask(request: _Request, domains: list[Domain]) -> PlacementGroup:
    return placement_group(
        [{request.resource: amount} for amount in request.amounts],
        strategy="STRICT_SPREAD" if request.is_spread else "PACK",
        name=request.name,
        lifetime="detached" if request.is_detached else None,
        bundle_label_selector=[domain.selector for domain in domains] or None,
    )


async def _is_placed(group: PlacementGroup, seconds: float) -> bool:
    """Wait until the group has its places; False when it has not within `seconds`."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), seconds)
    except TimeoutError:
        # What is slow may also be the process that Ray starts to tell so.
        return bool(placement_group_table(group)["state"] == "CREATED")
    return True


def _read_domains(resource: str) -> list[Domain]:
    """Return the domains of the living nodes; none where no node has the label, since Ray packs nodes itself."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    labels = {key: node["Labels"] for key, node in nodes.items()}
    if not any(DOMAIN_LABEL in known for known in labels.values()):
        return []
    free = {key: amounts.get(resource, 0.0) for key, amounts in available_resources_per_node().items()}
    total = {key: node["Resources"].get(resource, 0.0) for key, node in nodes.items()}
    return group_domains(labels, free, total)


def _say_spread(request: _Request, domains: list[Domain]) -> None:
    counts = Counter(domain.name for domain in domains)
    if len(counts) > 1:
        parts = ", ".join(f"{count} in {name}" for name, count in counts.items())
        _LOGGER.warning(
            "no scale-up domain holds all %s ranks: of %d places there are %s; what they exchange crosses the network",
            request.role,
            len(domains),
            parts,
        )


def rank_share(resource: str, ranks_per_device: int) -> float:
    """Return what one rank takes, rounded down to what Ray can count, so that all shares of a device fit on it."""
    return 1 if resource == "CPU" else (_RAY_PARTS // ranks_per_device) / _RAY_PARTS


def bundle_amount(num_ranks: int, share: float) -> float:
    """Return what a bundle for `num_ranks` ranks reserves; Ray takes whole devices only, or a part of one."""
    amount = round(num_ranks * share * _RAY_PARTS) / _RAY_PARTS
    return amount if amount < 1 else math.ceil(amount)


def bundle_sizes(num_ranks: int, ranks_per_node: int | None) -> list[int]:
    """Return the ranks of each bundle: one, or those of a node when their number is given."""
    if ranks_per_node is None:
        return [1] * num_ranks
    whole, rest = divmod(num_ranks, ranks_per_node)
    return [ranks_per_node] * whole + ([rest] if rest else [])


def _explain(request: _Request, domains: list[Domain], seconds: float) -> ConfigError | ClusterError:
    role, resource, amounts = request.role, request.resource, request.amounts
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
    if domains:
        message = f"{message} ({'; '.join(map(str, domains))})"
    elif is_spread:
        message = f"{message} ({_describe_nodes(resource)})"
    empty = [replace(domain, free=domain.total) for domain in domains]
    never = domains and choose_domains(empty, amounts, one_per_node=request.is_spread) is None
    if never or total < sum(amounts) or num_nodes < (len(amounts) if is_spread else 1):
        return ConfigError(f"{message}; ask for fewer ranks or add nodes", path=f"{role}.ranks")
    return ClusterError(f"{message}; wait until others have finished or ask for fewer ranks")


def _describe_nodes(resource: str) -> str:
    """Say how many nodes have how much of the resource: "2 nodes with 8, 1 node with 4"."""
    amounts = Counter(node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"])
    parts = (f"{count} {'node' if count == 1 else 'nodes'} with {amount:g}" for amount, count in amounts.items())
    return ", ".join(parts)
