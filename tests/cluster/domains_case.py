"""Two domains of two nodes and a node without a label, each a raylet; ranks are placed on them, none is started.

Run as a program, because a process can be connected to one Ray only. Prints what it found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group

from deepinfer.actors.domains import DOMAIN_LABEL
from deepinfer.actors.placement import Placement, place
from deepinfer.errors import DeepInferError
from deepinfer.launcher.environment import ray_environment, set_environment, write_token

NODES = [("rack-a", 2), ("rack-a", 2), ("rack-b", 3), ("rack-b", 3), (None, 4)]


async def place_ranks(role: str, ranks: int, per_node: int | None = None, seconds: float = 60) -> Placement:
    return await place(
        role, num_ranks=ranks, ranks_per_node=per_node, ranks_per_device=1, accelerator="cpu", name=f"case-{role}",
        timeout_seconds=seconds, is_detached=False,
    )  # fmt: skip


def domains_of(placement: Placement) -> list[str]:
    """The domain of each rank, in the order of ranks."""
    nodes = placement_group_table(placement.group)["bundles_to_node_id"]
    labels = {node["NodeID"]: node["Labels"].get(DOMAIN_LABEL, "alone") for node in ray.nodes()}
    return [labels[nodes[bundle]] for bundle in placement.bundle_indexes]


async def failure(*arguments: Any) -> str:
    try:
        await place_ranks(*arguments)
    except DeepInferError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("placed what must not fit")


async def look() -> dict[str, Any]:
    found: dict[str, Any] = {}
    both = await asyncio.gather(place_ranks("prefill", 4), place_ranks("decode", 4))
    found["side by side"] = [domains_of(placement) for placement in both]
    found["taken"] = await failure("other", 7, None, 3)
    for placement in both:
        remove_placement_group(placement.group)
    await asyncio.sleep(2)
    six = await place_ranks("decode", 6)
    found["six"] = domains_of(six)
    remove_placement_group(six.group)
    await asyncio.sleep(2)
    eight = await place_ranks("decode", 8)
    found["eight"] = domains_of(eight)
    remove_placement_group(eight.group)
    await asyncio.sleep(2)
    found["three a node"] = domains_of(await place_ranks("decode", 6, 3))
    found["too large"] = await failure("prefill", 12, 4, 3)
    return found


def run(folder: Path) -> dict[str, Any]:
    set_environment(ray_environment(write_token(folder)))
    store = {"object_store_memory": 80 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    for domain, num_cpus in NODES:
        cluster.add_node(num_cpus=num_cpus, labels={DOMAIN_LABEL: domain} if domain else {}, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found = asyncio.run(look())
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
