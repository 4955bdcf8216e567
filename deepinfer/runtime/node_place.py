"""Which ranks of a group stand on one node, asked of the ranks themselves."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.models.checkpoint_reads import NodePlace

# One kernel, one page cache: containers on a host share both.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def find_place(groups: ProcessGroups | None) -> NodePlace:
    """Return the place of this rank among its group's ranks on this node; a collective. `groups` None: it is alone."""
    if groups is None:
        return NodePlace()
    digest = hashlib.sha256(_BOOT_ID.read_bytes()).digest()
    own = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
    nodes = groups.sync.all_gather(own).flatten()
    return NodePlace(
        index=int((nodes[: groups.sync.rank] == own).sum()),
        num_ranks=int((nodes == own).sum()),
    )
