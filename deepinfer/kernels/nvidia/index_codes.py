"""Index keys and queries as operands of FP8 products, in Triton.

FP4 codes become E4M3 codes by a byte look-up, all groups of 32 of a vector moved to one power of two. Dot products of
such vectors are exact as long as the scales of their groups lie within a few powers of two of each other; groups below
2^-12 of the largest count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.number_formats import (
    decode_e8m0,
    encode_e2m1,
    encode_e8m0_ceiling,
    look_up,
    size_tables,
    widen_e2m1,
)


@triton.jit
def _query_kernel(
    query_ptr,
    weights_ptr,
    codes_ptr,
    factor_ptr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Quantise one row's queries to FP4, and write them as E4M3 codes: even channels, then odd ones.

    The weight of a head takes in its power of two. Weights that are no finite numbers, or above 2^100, become 0: they
    would spoil the rows beside them.
    """
    row = tl.program_id(0).to(tl.int64)
    heads, groups, pairs = tl.arange(0, HEAD_BLOCK), tl.arange(0, GROUP_BLOCK), tl.arange(0, 16)
    known = (heads < HEADS)[:, None, None] & (groups < GROUPS)[None, :, None]
    vector = (row * HEADS + heads)[:, None, None]
    channel = 32 * groups[None, :, None] + 2 * pairs[None, None, :]
    place = query_ptr + vector * (32 * GROUPS) + channel
    even = tl.load(place, mask=known, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=known, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(even), 2), tl.max(tl.abs(odd), 2))
    scale = encode_e8m0_ceiling(tl.maximum(largest, 7.052966104933725e-38) * (1.0 / 6.0))
    top = tl.max(scale, 1)
    lower, upper = size_tables(scale - top[:, None] + 12)
    factor = decode_e8m0(scale)[:, :, None]
    half = 16 * groups[None, :, None] + pairs[None, None, :]
    out = codes_ptr + vector * (32 * GROUP_BLOCK) + half
    inside = (heads < HEADS)[:, None, None]
    codes = encode_e2m1(tl.div_rn(even, factor + tl.zeros_like(even)))
    tl.store(out, look_up(codes, lower[:, :, None], upper[:, :, None]), mask=inside)
    codes = encode_e2m1(tl.div_rn(odd, factor + tl.zeros_like(odd)))
    tl.store(out + 16 * GROUP_BLOCK, look_up(codes, lower[:, :, None], upper[:, :, None]), mask=inside)
    weight = tl.load(weights_ptr + row * HEADS + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    weight = tl.where(tl.abs(weight) < 1.2676506002282294e30, weight, 0.0)
    tl.store(factor_ptr + row * HEADS + heads, weight * decode_e8m0(tl.maximum(top - 6, 1)), mask=heads < HEADS)


@triton.jit
def load_query(
    codes_ptr,
    factor_ptr,
    rows,
    num_rows,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Even and odd channels of the queries, FP8 [HALF, N] each, and bf16 weights [N]; N = ROWS * HEAD_BLOCK.

    Heads beyond HEADS weigh 0.
    """
    slots = tl.arange(0, ROWS * HEAD_BLOCK)
    row, head = rows + slots // HEAD_BLOCK, slots % HEAD_BLOCK
    known = (row < num_rows) & (head < HEADS)
    vector = row * HEADS + head
    place = codes_ptr + vector[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    even = tl.load(place, mask=known[:, None], other=0).to(tl.float8e4nv, bitcast=True)
    odd = tl.load(place + HALF, mask=known[:, None], other=0).to(tl.float8e4nv, bitcast=True)
    return tl.trans(even), tl.trans(odd), tl.load(factor_ptr + vector, mask=known, other=0.0)


@triton.jit
def load_keys(
    pool_ptr, offsets, KEYS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, PLAIN: tl.constexpr
):
    """Even and odd channels of packed keys, FP8 [KEYS, 16 * GROUP_BLOCK] each, and the power of two of each key."""
    groups = tl.arange(0, GROUP_BLOCK)
    group = groups
    if GROUPS < GROUP_BLOCK:
        group = tl.minimum(groups, GROUPS - 1)
    place = pool_ptr + offsets[:, None, None] + 16 * group[None, :, None] + tl.arange(0, 16)[None, None, :]
    codes = tl.load(place)
    scale = tl.load(pool_ptr + offsets[:, None] + 16 * GROUPS + group[None, :]).to(tl.int32)
    top = tl.max(scale, 1)
    shift = scale - top[:, None] + 12
    if GROUPS < GROUP_BLOCK:
        shift = tl.where((groups < GROUPS)[None, :], shift, -1)
    low, high = widen_e2m1(codes, shift, PLAIN)
    even = tl.reshape(low, (KEYS, 16 * GROUP_BLOCK)).to(tl.float8e4nv, bitcast=True)
    odd = tl.reshape(high, (KEYS, 16 * GROUP_BLOCK)).to(tl.float8e4nv, bitcast=True)
    return even, odd, decode_e8m0(tl.maximum(top - 6, 1))


@dataclass(slots=True, frozen=True)
class Query:
    """Quantised queries of T rows: E4M3 `codes` uint8 [T, Hi, 2, half] and head `weights` bf16 [T, Hi]."""

    codes: Tensor
    weights: Tensor
    num_groups: int

    def piece(self, rows: slice) -> Query:
        """Some of the rows."""
        return Query(self.codes[rows], self.weights[rows], self.num_groups)


def group_block(num_groups: int) -> int:
    """Groups of 32 channels in a product: a power of two, and 32 even channels at least."""
    return max(2, triton.next_power_of_2(num_groups))


def quantise_query(query: Tensor, weights: Tensor) -> Query:
    """Quantise queries [T, Hi, di] and take in their weights [T, Hi]."""
    num_rows, num_heads, width = query.shape
    num_groups = width // 32
    num_blocks = group_block(num_groups)
    codes = torch.empty(num_rows, num_heads, 2, 16 * num_blocks, dtype=torch.uint8, device=query.device)
    factors = torch.empty(num_rows, num_heads, dtype=torch.bfloat16, device=query.device)
    if num_rows:
        _query_kernel[(num_rows,)](
            query.contiguous(),
            weights.contiguous(),
            codes,
            factors,
            HEADS=num_heads,
            HEAD_BLOCK=triton.next_power_of_2(num_heads),
            GROUPS=num_groups,
            GROUP_BLOCK=num_blocks,
        )
    return Query(codes, factors, num_groups)
