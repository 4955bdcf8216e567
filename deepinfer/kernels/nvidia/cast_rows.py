"""Rows that were cast and packed, perhaps on another rank: placed for products, however often, and unpacked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.casts import GROUP
from deepinfer.kernels.nvidia.expert_layout import ExpertLayout
from deepinfer.kernels.nvidia.number_formats import decode_e8m0
from deepinfer.kernels.reference.quantize import decode_e8m0 as decode_scales

_ROWS = 16
_GROUPS = 8
_WORDS = tl.constexpr(GROUP // 4)  # of four codes, in a group
_TILE = tl.constexpr(GROUP)


@dataclass(slots=True, frozen=True)
class PlacedRows:
    """Cast rows in P places: `codes` E4M3 [P, K]; float32 `scales` [ceil(P / S), K / 128, S] of S places each."""

    codes: Tensor
    scales: Tensor


@triton.jit
def _place_rows_kernel(
    words_ptr,
    packed_ptr,
    expert_ptr,
    source_ptr,
    codes_ptr,
    scale_ptr,
    num_places,
    stride,
    PACKED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """ROWS places at a time, GROUPS groups of their codes and scales."""
    NUM_WORDS: tl.constexpr = NUM_GROUPS * _WORDS
    words = tl.program_id(1) * (GROUPS * _WORDS) + tl.arange(0, GROUPS * _WORDS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    first = tl.program_id(0) * ROWS
    expert = tl.load(expert_ptr + first // _TILE * _TILE)
    while expert >= 0:  # tiles of nobody come last
        places = first.to(tl.int64) + tl.arange(0, ROWS)
        source = tl.load(source_ptr + places).to(tl.int64)
        taken = source >= 0
        inside = taken[:, None] & (words < NUM_WORDS)[None, :]
        codes = tl.load(words_ptr + source[:, None] * (PACKED // 4) + words[None, :], mask=inside, other=0)
        tl.store(codes_ptr + places[:, None] * NUM_WORDS + words[None, :], codes, mask=inside)
        inside = taken[:, None] & (groups < NUM_GROUPS)[None, :]
        power = tl.load(packed_ptr + source[:, None] * PACKED + NUM_WORDS * 4 + groups[None, :], mask=inside, other=0)
        scales = scale_ptr + first // stride * ((NUM_GROUPS - 1) * stride) + groups[None, :] * stride
        tl.store(scales + places[:, None], decode_e8m0(power.to(tl.int32)), mask=inside)
        first += tl.num_programs(0) * ROWS
        expert = tl.load(expert_ptr + first // _TILE * _TILE, mask=first < num_places, other=-1)


def new_placed(num_places: int, width: int, part: int, device: torch.device) -> PlacedRows:
    """Empty rows with scales for `part` places each, a multiple of 128."""
    codes = torch.empty(num_places, width, dtype=torch.float8_e4m3fn, device=device)
    num_parts = triton.cdiv(num_places, part)
    return PlacedRows(codes, torch.empty(num_parts, width // GROUP, part, dtype=torch.float32, device=device))


def place_rows(packed: Tensor, layout: ExpertLayout, *, width: int, part: int) -> PlacedRows:
    """Rows of `packed` (see `ops.CastRows`), of `width` columns, in the places of a layout with tiles of 128; unwritten
    where nothing goes. As many programs run as `part` places want.
    """
    placed = new_placed(layout.num_places, width, part, packed.device)
    num_groups = width // GROUP
    _place_rows_kernel[(part // _ROWS, triton.cdiv(num_groups, _GROUPS))](
        packed.view(torch.int32),
        packed,
        layout.expert,
        layout.source,
        placed.codes.view(torch.int32),
        placed.scales,
        layout.num_places,
        part,
        PACKED=packed.shape[1],
        NUM_GROUPS=num_groups,
        ROWS=_ROWS,
        GROUPS=_GROUPS,
    )
    return placed


def unpack_rows(packed: Tensor, *, width: int) -> Tensor:
    """bf16 [R, `width`]: the values of `packed` rows, exact."""
    codes = packed[:, :width].view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
    scales = decode_scales(packed[:, width : width + width // GROUP])
    return (codes * scales.unsqueeze(2)).flatten(1).bfloat16()
