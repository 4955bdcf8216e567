"""A piece of memory on each rank's GPU that all ranks of one host can write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from deepinfer.distributed.process_groups import Group


@dataclass(slots=True, frozen=True)
class PeerMemory:
    """`own` [B] uint8: this rank's piece. `peers` int64 [R] on the device: where each rank's piece begins, seen here.

    `handle` keeps the other ranks' pieces mapped.
    """

    own: torch.Tensor
    peers: torch.Tensor
    handle: Any = None


def open_peer_memory(group: Group, store: TCPStore, num_bytes: int, device: torch.device) -> PeerMemory:
    """Allocate `num_bytes` zeroed bytes on every rank's `device` and map each other's; a collective of `group`.

    Once per process and role. It is torch's symmetric memory; `config.allow_peer_memory` has to come first. Raises
    RuntimeError where GPUs can't reach each other.
    """
    name = f"deepinfer/{group.role}"
    _SymmetricMemory.set_group_info(name, group.rank, group.num_ranks, PrefixStore(name, store))
    own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    own.zero_()
    handle = _SymmetricMemory.rendezvous(own, name)
    assert handle is not None, name
    return PeerMemory(own, torch.tensor(handle.buffer_ptrs, dtype=torch.int64).to(device), handle)
