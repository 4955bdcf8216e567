"""Rows of routed experts in tiles that hold one expert each, as grouped products want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_STEP = 64  # copies that a program places
_FEW_COPIES = 8192  # up to so many, every program adds up the counts of all chunks; of more, a kernel of its own does
_CHUNKS_AT_ONCE = 32
_SCANNED_EXPERTS, _SCANNED_CHUNKS = 8, 128  # at once


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


@triton.jit(do_not_specialize=["num_copies"])
def _count_kernel(ids_ptr, counts_ptr, num_copies, NUM_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """How many of a chunk's copies go to each expert."""
    copies = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + copies, mask=copies < num_copies, other=-1).to(tl.int32)
    counts = tl.histogram(ids, NUM_BLOCK, mask=ids >= 0)
    tl.store(counts_ptr + tl.program_id(0) * NUM_BLOCK + tl.arange(0, NUM_BLOCK), counts)


@triton.jit(do_not_specialize=["num_chunks"])
def _earlier_count_kernel(
    counts_ptr, num_chunks, NUM_BLOCK: tl.constexpr, EXPERTS: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr
):
    """Counts become those of the chunks before; the row behind the last one becomes those of all."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = start + tl.arange(0, CHUNKS_AT_ONCE)
        place = counts_ptr + chunks[:, None] * NUM_BLOCK + experts[None, :]
        inside = (chunks < num_chunks)[:, None]
        counts = tl.load(place, mask=inside, other=0)
        tl.store(place, before[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        before += tl.sum(counts, 0)
    tl.store(counts_ptr + num_chunks * NUM_BLOCK + experts, before)


@triton.jit
def _sum_counts(
    counts_ptr, num_chunks, chunk, SCANNED: tl.constexpr, NUM_BLOCK: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr
):
    """Copies of each expert: of all chunks, and of those before `chunk`."""
    experts = tl.arange(0, NUM_BLOCK)
    total, before = tl.zeros((NUM_BLOCK,), tl.int32), tl.zeros((NUM_BLOCK,), tl.int32)
    if SCANNED:
        total += tl.load(counts_ptr + num_chunks * NUM_BLOCK + experts)
        before += tl.load(counts_ptr + tl.minimum(chunk, num_chunks) * NUM_BLOCK + experts)
    else:
        for start in range(0, num_chunks, CHUNKS_AT_ONCE):
            chunks = start + tl.arange(0, CHUNKS_AT_ONCE)
            place = counts_ptr + chunks[:, None] * NUM_BLOCK + experts[None, :]
            counts = tl.load(place, mask=(chunks < num_chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), 0)
    return total, before


@triton.jit(do_not_specialize=["num_copies", "num_chunks", "num_tiles"])
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
    SCANNED: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """A program places one step of copies, in order, and marks one tile: whose it is, and where it is padding."""
    number = tl.program_id(0)
    first = number * STEP
    chunk = first // CHUNK
    experts = tl.arange(0, NUM_BLOCK)
    total, before = _sum_counts(counts_ptr, num_chunks, chunk, SCANNED, NUM_BLOCK, CHUNKS_AT_ONCE)
    tiles = (total + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    if first < num_copies:
        earlier = chunk * CHUNK + tl.arange(0, CHUNK)
        earlier_ids = tl.load(ids_ptr + earlier, mask=earlier < first, other=-1).to(tl.int32)
        free = (ends - tiles) * TILE + before + tl.histogram(earlier_ids, NUM_BLOCK, mask=earlier_ids >= 0)
        copies = first + tl.arange(0, STEP)
        ids = tl.load(ids_ptr + copies, mask=copies < num_copies, other=-1).to(tl.int32)
        goes = (ids[:, None] == experts[None, :]).to(tl.int32)
        places = tl.sum(goes * (free[None, :] + tl.cumsum(goes, 0) - 1), 1)
        tl.store(source_ptr + places, copies // COPIES, mask=ids >= 0)
        tl.store(copy_ptr + places, copies, mask=ids >= 0)
        tl.store(place_ptr + copies, tl.where(ids >= 0, places, -1), mask=copies < num_copies)
    if number < num_tiles:
        own = (number < ends) & (number >= ends - tiles)
        expert = tl.sum(tl.where(own, experts, 0), 0)
        end = tl.sum(tl.where(own, (ends - tiles) * TILE + total, 0), 0)
        marked = number * TILE + tl.arange(0, TILE)
        tl.store(expert_ptr + marked, tl.where(marked < end, expert, -1))
        tl.store(source_ptr + marked, -1, mask=marked >= end)
        tl.store(copy_ptr + marked, -1, mask=marked >= end)


def lay_out_experts(expert_ids: Tensor, *, num_experts: int, tile: int) -> ExpertLayout:
    """Return the layout of the copies `expert_ids` [R, C] int64 (-1: no expert), those of an expert in their order."""
    num_copies, device = expert_ids.numel(), expert_ids.device
    num_tiles = num_copies // tile + min(num_experts, num_copies)
    expert, source, copy = torch.empty(3, num_tiles * tile, dtype=torch.int32, device=device)
    places = torch.empty(expert_ids.shape, dtype=torch.int32, device=device)
    if num_copies:
        is_scanned = num_copies > _FEW_COPIES
        chunk = (8 if is_scanned else 4) * _STEP
        num_chunks, block = triton.cdiv(num_copies, chunk), triton.next_power_of_2(num_experts)
        counts = torch.empty(num_chunks + 1, block, dtype=torch.int32, device=device)
        expert_ids = expert_ids.contiguous()
        _count_kernel[(num_chunks,)](expert_ids, counts, num_copies, NUM_BLOCK=block, CHUNK=chunk)
        if is_scanned:
            experts = min(_SCANNED_EXPERTS, block)
            _earlier_count_kernel[(block // experts,)](
                counts, num_chunks, NUM_BLOCK=block, EXPERTS=experts, CHUNKS_AT_ONCE=_SCANNED_CHUNKS
            )
        _place_kernel[(max(triton.cdiv(num_copies, _STEP), num_tiles),)](
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
            SCANNED=is_scanned,
            CHUNKS_AT_ONCE=_CHUNKS_AT_ONCE,
            num_warps=2 if is_scanned else 4,
        )
    return ExpertLayout(expert, source, copy, places)
