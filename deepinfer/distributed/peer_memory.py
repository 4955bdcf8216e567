"""A piece of memory on each rank's GPU that all ranks of one host can write."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from deepinfer.distributed.process_groups import Group


@dataclass(slots=True, frozen=True)
class PeerMemory:
    """`own` [B] uint8: this rank's piece. `peers` int64 [R] on the device: where each rank's piece begins, seen here.

    `pieces` are all ranks' pieces by rank, mapped here.
    """

    own: torch.Tensor
    peers: torch.Tensor
    pieces: tuple[torch.Tensor, ...] = ()


def open_peer_memory(group: Group, store: TCPStore, num_bytes: int, device: torch.device) -> PeerMemory:
    """Allocate `num_bytes` zeroed bytes on every rank's `device` and map each other's; a collective of `group`.

    Once for each role of a group. CUDA's handles for other processes carry it, which need neither NVLink multicast nor
    that a process sees the GPUs of the others. Raises RuntimeError where GPUs can't reach each other.
    """
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    handle = own.untyped_storage()._share_cuda_()
    store.set(_key(group.role, group.rank), msgspec.msgpack.encode(handle).hex())
    pieces = []
    for rank in range(group.num_ranks):
        sent = store.get(_key(group.role, rank))
        pieces.append(own if rank == group.rank else _map_piece(sent, num_bytes, device))
    peers = torch.tensor([piece.data_ptr() for piece in pieces], dtype=torch.int64).to(device)
    return PeerMemory(own, peers, tuple(pieces))


def _map_piece(sent: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Map another rank's piece for `device`; the first part of a handle numbers the GPU as its owner does."""
    _, *rest = msgspec.msgpack.decode(bytes.fromhex(sent.decode()))
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *rest)  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def _key(role: str, rank: int) -> str:
    return f"{role}/memory/{rank}"
