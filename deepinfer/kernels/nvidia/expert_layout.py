"""Rows of routed experts in tiles that hold one expert each, as grouped products want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_STEP = 64
_FEW_COPIES = 16384  # up to so many, a program finds the places of one step of copies; of more, of eight steps
_CHUNKS_AT_ONCE = 32


@dataclass(slots=True, frozen=True)
class ExpertLayout:
    """P padded places, all int32: `expert` [P]; `source` [P], the row there, and `copy` [P], its flat number among the
    copies; all -1 at padding. `places` [R, C] of each copy, -1 if it goes to no expert.

    P depends on the number of copies and of experts only, never on who goes where: nothing waits for the device.
    """

    expert: Tensor
    source: Tensor
    copy: Tensor
    places: Tensor

    @property
    def num_places(self) -> int:
        """P."""
        return len(self.source)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, num_copies, NUM_BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """How many of a chunk's copies go to each expert."""
    experts = tl.arange(0, NUM_BLOCK)
    total = tl.zeros((NUM_BLOCK,), tl.int32)
    for start in range(0, CHUNK, STEP):
        copies = tl.program_id(0) * CHUNK + start + tl.arange(0, STEP)
        ids = tl.load(ids_ptr + copies, mask=copies < num_copies, other=-1).to(tl.int32)
        total += tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * NUM_BLOCK + experts, total)


@triton.jit
def _place_kernel(
    ids_ptr,
    counts_ptr,
    expert_ptr,
    source_ptr,
    copy_ptr,
    place_ptr,
    num_copies,
    num_chunks,
    num_tiles,
    COPIES: tl.constexpr,
    NUM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """A program places the copies of one chunk, in order, and marks one tile: whose it is, and where it is padding."""
    number = tl.program_id(0)
    experts = tl.arange(0, NUM_BLOCK)
    total, before = tl.zeros((NUM_BLOCK,), tl.int32), tl.zeros((NUM_BLOCK,), tl.int32)
    for start in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = start + tl.arange(0, CHUNKS_AT_ONCE)
        place = counts_ptr + chunks[:, None] * NUM_BLOCK + experts[None, :]
        counts = tl.load(place, mask=(chunks < num_chunks)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((chunks < number)[:, None], counts, 0), 0)
    tiles = (total + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    if number < num_chunks:
        free = (ends - tiles) * TILE + before
        for start in range(0, CHUNK, STEP):
            copies = number * CHUNK + start + tl.arange(0, STEP)
            ids = tl.load(ids_ptr + copies, mask=copies < num_copies, other=-1).to(tl.int32)
            goes = (ids[:, None] == experts[None, :]).to(tl.int32)
            places = tl.sum(goes * (free[None, :] + tl.cumsum(goes, 0) - 1), 1)
            tl.store(source_ptr + places, copies // COPIES, mask=ids >= 0)
            tl.store(copy_ptr + places, copies, mask=ids >= 0)
            tl.store(place_ptr + copies, tl.where(ids >= 0, places, -1), mask=copies < num_copies)
            free += tl.sum(goes, 0)
    if number < num_tiles:
        own = (number < ends) & (number >= ends - tiles)
        expert = tl.sum(tl.where(own, experts, 0), 0)
        end = tl.sum(tl.where(own, (ends - tiles) * TILE + total, 0), 0)
        places = number * TILE + tl.arange(0, TILE)
        tl.store(expert_ptr + places, tl.where(places < end, expert, -1))
        tl.store(source_ptr + places, -1, mask=places >= end)
        tl.store(copy_ptr + places, -1, mask=places >= end)


def lay_out_experts(expert_ids: Tensor, *, num_experts: int, tile: int) -> ExpertLayout:
    """Return the layout of the copies `expert_ids` [R, C] int64 (-1: no expert), those of an expert in their order."""
    num_copies, device = expert_ids.numel(), expert_ids.device
    num_tiles = num_copies // tile + min(num_experts, num_copies)
    expert, source, copy = torch.empty(3, num_tiles * tile, dtype=torch.int32, device=device)
    places = torch.empty(expert_ids.shape, dtype=torch.int32, device=device)
    if num_copies:
        chunk = _STEP if num_copies <= _FEW_COPIES else 8 * _STEP
        num_chunks, block = triton.cdiv(num_copies, chunk), triton.next_power_of_2(num_experts)
        counts = torch.empty(num_chunks, block, dtype=torch.int32, device=device)
        expert_ids = expert_ids.contiguous()
        _count_kernel[(num_chunks,)](expert_ids, counts, num_copies, NUM_BLOCK=block, CHUNK=chunk, STEP=_STEP)
        _place_kernel[(max(num_chunks, num_tiles),)](
            expert_ids,
            counts,
            expert,
            source,
            copy,
            places,
            num_copies,
            num_chunks,
            num_tiles,
            COPIES=expert_ids.shape[1],
            NUM_BLOCK=block,
            TILE=tile,
            CHUNK=chunk,
            STEP=_STEP,
            CHUNKS_AT_ONCE=_CHUNKS_AT_ONCE,
        )
    return ExpertLayout(expert, source, copy, places)
