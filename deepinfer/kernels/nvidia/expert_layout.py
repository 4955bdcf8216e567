"""Rows of routed experts in tiles that hold one expert each, as grouped products want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(slots=True, frozen=True)
class ExpertLayout:
    """P padded places, all int32: `expert` [P] and `source` [P], the row there (-1: padding); `place` [N] of each row,
    0 for rows that belong to no expert.

    P depends on N and the number of experts only, never on the counts: nothing waits for the device.
    """

    expert: Tensor
    source: Tensor
    place: Tensor

    @property
    def num_places(self) -> int:
        """P."""
        return len(self.source)


@triton.jit
def _layout_kernel(
    counts_ptr,
    expert_ptr,
    source_ptr,
    place_ptr,
    num_rows,
    NUM: tl.constexpr,
    NUM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program fills one tile, and the places of those of TILE rows that belong to no expert."""
    tile = tl.program_id(0)
    experts = tl.arange(0, NUM_BLOCK)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM, other=0).to(tl.int32)
    tiles = (counts + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    own = (tile < ends) & (tile >= ends - tiles)
    expert = tl.sum(tl.where(own, experts, 0), 0)
    count = tl.sum(tl.where(own, counts, 0), 0)
    begin = tl.sum(tl.where(own, tl.cumsum(counts, 0) - counts, 0), 0)
    first = tl.sum(tl.where(own, ends - tiles, 0), 0)
    places = tile * TILE + tl.arange(0, TILE)
    inner = places - first * TILE
    taken = inner < count
    tl.store(expert_ptr + places, tl.where(taken, expert, -1))
    tl.store(source_ptr + places, tl.where(taken, begin + inner, -1))
    tl.store(place_ptr + begin + inner, places, mask=taken)
    tl.store(place_ptr + places, 0, mask=(places >= tl.sum(counts, 0)) & (places < num_rows))


def lay_out_experts(tokens_per_expert: Tensor, num_rows: int, *, tile: int) -> ExpertLayout:
    """Return the layout of `num_rows` rows ordered by expert, `tokens_per_expert` [E] of them each, the rest behind."""
    num_experts, device = len(tokens_per_expert), tokens_per_expert.device
    num_tiles = num_rows // tile + min(num_experts, num_rows)
    expert = torch.empty(num_tiles * tile, dtype=torch.int32, device=device)
    source, place = torch.empty_like(expert), torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_tiles:
        _layout_kernel[(num_tiles,)](
            tokens_per_expert,
            expert,
            source,
            place,
            num_rows,
            NUM=num_experts,
            NUM_BLOCK=triton.next_power_of_2(num_experts),
            TILE=tile,
        )
    return ExpertLayout(expert, source, place)
