"""What stands around DeepGEMM's grouped FP8 products, in Triton: tiles it was not given, and SwiGLU between two.

DeepGEMM spends much on a tile of nobody, and how many there are is known to the device alone. So it gets the tiles that
nearly always suffice, and programs of this file look whether more came.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.cast_rows import PlacedRows, new_placed
from deepinfer.kernels.nvidia.casts import GROUP, store_cast
from deepinfer.kernels.nvidia.expert_layout import ExpertLayout
from deepinfer.kernels.nvidia.fences import fence_copies
from deepinfer.kernels.nvidia.fp8_weights import Fp8Weight
from deepinfer.kernels.nvidia.moe import swiglu_halves

_PROGRAMS = 132  # the processors of a Hopper GPU
_GROUP = tl.constexpr(GROUP)
_MIN_SAVED = 8  # tiles of nobody, which cost an H200 1 to 3 us each; an idle launch costs 1.4 to 4
_STAGES = tl.constexpr(4)
_WARPS = 8
_ROWS, _BLOCK = 4, 512  # of places that a program of SwiGLU casts, columns that it does at a time


@triton.jit
def _multiply_tile(codes_ptr, scale_ptr, weight_ptr, factor_ptr, stride, K: tl.constexpr, PLAIN: tl.constexpr):
    """128 rows of x, the scales of a group of which lie `stride` apart, times 128 rows of weights: float32."""
    inner = tl.arange(0, _GROUP)
    x_ptr = codes_ptr + inner[:, None] * K + inner[None, :]
    w_ptr = weight_ptr + inner[None, :] * K + inner[:, None]
    total = tl.zeros((_GROUP, _GROUP), tl.float32)
    for group in tl.range(0, K // _GROUP, num_stages=_STAGES):
        x = tl.load(x_ptr + group * _GROUP)
        weight = tl.load(w_ptr + group * _GROUP)
        scale = tl.load(scale_ptr + group * stride + inner) * tl.load(factor_ptr + group)
        fence_copies(PLAIN)
        total += tl.dot(x, weight) * scale[:, None]
    return total


@triton.jit(do_not_specialize=["first_tile", "num_tiles"])
def _grouped_fp8_kernel(
    codes_ptr,
    scale_ptr,
    weight_ptr,
    factor_ptr,
    out_ptr,
    expert_ptr,
    first_tile,
    num_tiles,
    stride,
    N: tl.constexpr,
    K: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Tiles from `first_tile` on, 128 columns at a time; tiles of nobody come last."""
    NUM_COLUMNS: tl.constexpr = N // _GROUP
    NUM_GROUPS: tl.constexpr = K // _GROUP
    item = tl.program_id(0)
    tile = first_tile + item // NUM_COLUMNS
    expert = tl.load(expert_ptr + tile * _GROUP, mask=tile < num_tiles, other=-1).to(tl.int64)
    while expert >= 0:
        first = tile.to(tl.int64) * _GROUP
        column = item % NUM_COLUMNS
        block = expert * NUM_COLUMNS + column
        total = _multiply_tile(
            codes_ptr + first * K,
            scale_ptr + first + first // stride * ((NUM_GROUPS - 1) * stride),
            weight_ptr + block * (_GROUP * K),
            factor_ptr + block * NUM_GROUPS,
            stride,
            K,
            PLAIN,
        )
        rows = first + tl.arange(0, _GROUP)
        columns = column * _GROUP + tl.arange(0, _GROUP)
        tl.store(out_ptr + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))
        item += tl.num_programs(0)
        tile = first_tile + item // NUM_COLUMNS
        expert = tl.load(expert_ptr + tile * _GROUP, mask=tile < num_tiles, other=-1).to(tl.int64)


def multiply_tiles(
    x: PlacedRows, weight: Fp8Weight, expert: Tensor, out: Tensor, *, first: int, num_programs: int = _PROGRAMS
) -> None:
    """Write the tiles of 128 places from tile `first` on into `out` bf16 [P, N]: x [P, K] times the weights
    [E, N, K] of `expert` int32 [P]. A tile is its first place's expert's; those of nobody come last and stay unwritten.
    `num_programs` go through them in turn.
    """
    num_tiles = len(expert) // GROUP
    if first < num_tiles:
        _, columns, depth = weight.codes.shape
        _grouped_fp8_kernel[(num_programs,)](
            x.codes,
            x.scales,
            weight.codes,
            weight.scale,
            out,
            expert,
            first,
            num_tiles,
            x.scales.shape[2],
            N=columns,
            K=depth,
            PLAIN=not out.is_cuda,
            num_warps=_WARPS,
        )


@triton.jit
def _swiglu_places_kernel(
    both_ptr,
    weights_ptr,
    expert_ptr,
    copy_ptr,
    codes_ptr,
    scale_ptr,
    num_places,
    stride,
    limit,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """ROWS places at a time, BLOCK columns: SwiGLU, times the routing weight, rounded to bf16, then cast."""
    column = tl.program_id(1) * BLOCK
    first = tl.program_id(0) * ROWS
    expert = tl.load(expert_ptr + first // _GROUP * _GROUP)
    while expert >= 0:  # tiles of nobody come last
        places = first.to(tl.int64) + tl.arange(0, ROWS)
        copy = tl.load(copy_ptr + places)
        inside = copy >= 0
        values = swiglu_halves(both_ptr, places, inside, column + tl.arange(0, BLOCK), limit, WIDTH)
        weight = tl.load(weights_ptr + copy, mask=inside, other=0.0)
        rounded = (weight[:, None] * values).to(tl.bfloat16).to(tl.float32)
        scales = scale_ptr + first // stride * ((WIDTH // 128 - 1) * stride)
        store_cast(rounded, codes_ptr, scales, places, inside, column, WIDTH, stride, ROWS, BLOCK, PLAIN)
        first += tl.num_programs(0) * ROWS
        expert = tl.load(expert_ptr + first // _GROUP * _GROUP, mask=first < num_places, other=-1)


def swiglu_places(both: Tensor, weights: Tensor, layout: ExpertLayout, *, limit: float, part: int) -> PlacedRows:
    """SwiGLU of `both` bf16 [P, 2K], gate and up side by side, times the routing weight of the copy in that place,
    cast; scales for `part` places each, a multiple of 128.
    """
    width = both.shape[1] // 2
    placed = new_placed(layout.num_places, width, part, both.device)
    _swiglu_places_kernel[(part // _ROWS, triton.cdiv(width, _BLOCK))](
        both,
        weights.contiguous(),
        layout.expert,
        layout.copy,
        placed.codes.view(torch.uint8),
        placed.scales,
        layout.num_places,
        part,
        limit,
        WIDTH=width,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        PLAIN=not both.is_cuda,
    )
    return placed


def foresee_tiles(num_copies: int, *, num_experts: int, num_tiles: int) -> int:
    """How many of `num_tiles` tiles of 128 places nearly always hold so many copies, if experts get about equally many.

    The last tile of an expert is half full, but with few copies or equal ones all experts need the same number. All
    tiles where that saves less than what looking for more costs.
    """
    mean = num_copies / num_experts
    equal = num_experts * math.ceil((mean - math.sqrt(mean)) / GROUP)
    foreseen = max(equal, num_copies // GROUP + num_experts * 9 // 16 + 1)
    return foreseen if foreseen + _MIN_SAVED <= num_tiles else num_tiles
