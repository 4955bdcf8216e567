"""Scores of index keys in Triton, over all entries of a sequence or inside kept blocks, with their maxima by eights.

Products run in FP8 (see `index_codes`); powers of two are multiplied in at the end, which leaves the bf16 roundings of
the contract where the reference has them. Heads are added up by a second product, with a matrix of ones.
Byte offsets are sums of products, not products of sums: Triton 3.6 takes 16 * b + e % 16 for a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.cache import LocateEntries
from deepinfer.kernels.nvidia.index_codes import Query, load_query
from deepinfer.kernels.nvidia.select import block_maxima
from deepinfer.kernels.ops import CandidateRule, PagedRows

GROUP = 8  # neighbouring entries under one maximum
_ROW_TILE = 4
_KEYS = 64
_SPAN = 4096
_SUMS = 8  # columns of the product that adds up heads: the fewest that a matrix unit takes
_WARPS = 4
_STAGES = 5  # a place in the table is read two tiles before the keys, and those two before they are scored
_MAX_REGISTERS = 128  # four programs to a multiprocessor
_KEPT_KEYS = 128
_KEPT_SPAN = 2048
_KEPT_STAGES = 1  # more programs to a multiprocessor hide more than copies ahead

_WEIGH = tl.constexpr("""
{
    .reg .b32 dots;
    cvt.rn.relu.bf16x2.f32 dots, $2, $1;
    mul.bf16x2 $0, dots, $3;
}
""")


@triton.jit
def _weigh(dots, weights, PLAIN: tl.constexpr):
    """relu(dots) rounded to bf16, times the bf16 weights, rounded to bf16."""
    if PLAIN:
        rounded = tl.maximum(dots, 0.0).to(tl.bfloat16).to(tl.float32)
        products = (rounded * weights.to(tl.float32)).to(tl.bfloat16)
    else:
        products = tl.inline_asm_elementwise(
            _WEIGH, "=r,r,r,r", [dots, weights], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return products


@triton.jit
def _sum_of_heads(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr, SUMS: tl.constexpr):
    """The matrix [N, SUMS] whose product adds up the heads of each row: ones and zeros, bf16."""
    row = tl.arange(0, ROWS * HEAD_BLOCK)[:, None] // HEAD_BLOCK
    return tl.where(row == tl.arange(0, SUMS)[None, :], 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def _sums(pool_ptr, words_ptr, offsets, query, weights, summing, WIDTH: tl.constexpr, PLAIN: tl.constexpr):
    """Sums [KEYS, SUMS] float32 of weighted dots, and the power of two [KEYS] that is still to be multiplied in.

    Dots and weighted dots are rounded to bf16, the sums are not yet.
    """
    keys = tl.load(pool_ptr + offsets[:, None] + tl.arange(0, WIDTH)[None, :])
    power = tl.load(words_ptr + offsets // 4 + WIDTH // 4)  # a byte of 1 .. 254, then zeros
    total = tl.dot(_weigh(tl.dot(keys, query), weights[None, :], PLAIN), summing)
    return total, (power << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scan_kernel(
    codes_ptr,
    factor_ptr,
    pool_ptr,
    words_ptr,
    table_ptr,
    sequence_ptr,
    visible_ptr,
    score_ptr,
    num_rows,
    table_stride,
    score_stride,
    PER_BLOCK: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """ROWS neighbouring rows against SPAN entries; rows of one sequence share the loaded keys.

    Entries behind the visible ones of a row, up to the next multiple of KEYS, get scores of no meaning.
    """
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = first_row + tl.arange(0, SUMS)
    inside = (tl.arange(0, SUMS) < ROWS) & (rows < num_rows)
    first = tl.program_id(1) * SPAN
    visible = tl.load(visible_ptr + rows, mask=inside, other=0).to(tl.int32)
    if tl.max(visible, 0) > first:
        query, weights = load_query(codes_ptr, factor_ptr, first_row, num_rows, ROWS, HEADS, HEAD_BLOCK, WIDTH)
        summing = _sum_of_heads(ROWS, HEAD_BLOCK, SUMS)
        sequences = tl.load(sequence_ptr + rows, mask=inside, other=-1)
        before = tl.load(sequence_ptr + rows - 1, mask=inside & (tl.arange(0, SUMS) > 0), other=-1)
        for turn in range(tl.minimum(num_rows - first_row, ROWS).to(tl.int32)):
            here = tl.arange(0, SUMS) == turn
            sequence = tl.max(tl.where(here, sequences, -1), 0)
            previous = tl.max(tl.where(here, before, -1), 0)
            own = tl.where((sequences == sequence) & (previous != sequence), visible, 0)
            limit = tl.minimum(tl.max(own, 0), first + SPAN)
            for start in tl.range(first, limit, KEYS, num_stages=STAGES):
                entries = start + tl.arange(0, KEYS)
                if PER_BLOCK % KEYS == 0 or 2 * PER_BLOCK == KEYS:
                    block = tl.load(table_ptr + sequence * table_stride + start // PER_BLOCK)
                    first_byte = block * (PER_BLOCK * NUM_BYTES) + start % PER_BLOCK * NUM_BYTES
                    offsets = tl.arange(0, KEYS) * NUM_BYTES
                    if PER_BLOCK < KEYS:
                        following = tl.minimum(start + PER_BLOCK, limit - 1) // PER_BLOCK
                        following = tl.load(table_ptr + sequence * table_stride + following)
                        leap = (following - block - 1) * (PER_BLOCK * NUM_BYTES)
                        offsets = offsets + tl.where(tl.arange(0, KEYS) < PER_BLOCK, 0, leap)
                    offsets = tl.multiple_of(offsets, NUM_BYTES & -NUM_BYTES)
                else:
                    known = tl.minimum(entries, limit - 1)
                    block = tl.load(table_ptr + sequence * table_stride + known // PER_BLOCK)
                    first_byte = 0
                    offsets = tl.multiple_of(
                        block * (PER_BLOCK * NUM_BYTES) + known % PER_BLOCK * NUM_BYTES, NUM_BYTES & -NUM_BYTES
                    )
                total, factor = _sums(
                    pool_ptr + first_byte, words_ptr + first_byte // 4, offsets, query, weights, summing, WIDTH, PLAIN
                )
                scores = total.to(tl.bfloat16).to(tl.float32) * factor[:, None]
                place = score_ptr + rows[None, :] * score_stride + entries[:, None]
                tl.store(place, scores, mask=(own > 0)[None, :])


@triton.jit
def _kept_kernel(
    codes_ptr,
    factor_ptr,
    pool_ptr,
    words_ptr,
    group_ptr,
    kept_ptr,
    visible_ptr,
    score_ptr,
    num_rows,
    NUM_BYTES: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """One row against the entries of SPAN places of its kept blocks, side by side; -inf where there is none.

    `group_ptr`: where each kept block begins in the pool, in blocks.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPAN
    visible = tl.load(visible_ptr + row)
    query, weights = load_query(codes_ptr, factor_ptr, row, num_rows, 1, HEADS, HEAD_BLOCK, WIDTH)
    summing = _sum_of_heads(1, HEAD_BLOCK, SUMS)
    inner = tl.arange(0, KEYS) % SIZE
    for start in tl.range(first, tl.minimum(first + SPAN, NUM_KEPT * SIZE), KEYS, num_stages=STAGES):
        places = start + tl.arange(0, KEYS)
        known, block = places < NUM_KEPT * SIZE, row * NUM_KEPT + places // SIZE
        group = tl.load(group_ptr + block, mask=known, other=-1).to(tl.int64)
        kept = tl.load(kept_ptr + block, mask=known, other=-1)
        offsets = tl.maximum(group, 0) * (SIZE * NUM_BYTES) + inner * NUM_BYTES
        offsets = tl.multiple_of(offsets, NUM_BYTES & -NUM_BYTES)
        total, factor = _sums(pool_ptr, words_ptr, offsets, query, weights, summing, WIDTH, PLAIN)
        score = tl.sum(total, 1).to(tl.bfloat16).to(tl.float32) * factor  # all columns but the first are zero
        seen = (kept >= 0) & (kept * SIZE + inner < visible)
        tl.store(score_ptr + row * (NUM_KEPT * SIZE) + places, tl.where(seen, score, float("-inf")), mask=known)


@dataclass(slots=True, frozen=True)
class Scores:
    """bf16 `values` [T, C] and `maxima` [T, ceil(C / 8)] of neighbouring eights; unwritten where nothing is visible."""

    values: Tensor
    maxima: Tensor


def score_all(query: Query, keys: PagedRows, row_sequence: Tensor, visible: Tensor) -> Scores:
    """Scores of every visible entry; C is what the block table can hold, up to the next multiple of 64."""
    num_rows, num_heads, width = query.codes.shape
    capacity = triton.cdiv(keys.block_table.shape[1] * keys.entries_per_block, _KEYS) * _KEYS
    values = torch.empty(num_rows, capacity, dtype=torch.bfloat16, device=visible.device)
    if num_rows:
        _scan_kernel[(triton.cdiv(num_rows, _ROW_TILE), triton.cdiv(capacity, _SPAN))](
            query.codes,
            query.weights,
            keys.pool.view(torch.float8_e4m3fn),
            keys.pool.view(torch.int32),
            keys.block_table,
            row_sequence,
            visible,
            values,
            num_rows,
            keys.block_table.stride(0),
            values.stride(0),
            PER_BLOCK=keys.entries_per_block,
            NUM_BYTES=keys.record.num_bytes,
            HEADS=num_heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(num_heads)),
            WIDTH=width,
            ROWS=_ROW_TILE,
            KEYS=_KEYS,
            SPAN=_SPAN,
            SUMS=_SUMS,
            STAGES=_STAGES,
            PLAIN=not visible.is_cuda,
            num_warps=_WARPS,
            maxnreg=_MAX_REGISTERS,
        )
    return Scores(values, block_maxima(values, visible, unit=1, size=GROUP, newest=False))


def score_kept(
    query: Query, keys: PagedRows, row_sequence: Tensor, visible: Tensor, kept: Tensor, rule: CandidateRule
) -> Scores:
    """Scores of the entries of the blocks `kept` [T, n] (contiguous), block by block; -inf where there is none."""
    assert keys.entries_per_block % rule.block_size == 0, "a candidate block must not cross cache blocks"
    num_rows, num_heads, width = query.codes.shape
    num_places = kept.shape[1] * rule.block_size
    values = torch.empty(num_rows, num_places, dtype=torch.bfloat16, device=visible.device)
    if num_rows:
        groups_per_block = keys.entries_per_block // rule.block_size
        groups = LocateEntries()(kept, row_sequence, keys.block_table, entries_per_block=groups_per_block)
        _kept_kernel[(num_rows, triton.cdiv(num_places, _KEPT_SPAN))](
            query.codes,
            query.weights,
            keys.pool.view(torch.float8_e4m3fn),
            keys.pool.view(torch.int32),
            groups,
            kept,
            visible,
            values,
            num_rows,
            NUM_BYTES=keys.record.num_bytes,
            NUM_KEPT=kept.shape[1],
            SIZE=rule.block_size,
            HEADS=num_heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(num_heads)),
            WIDTH=width,
            KEYS=_KEPT_KEYS,
            SPAN=_KEPT_SPAN,
            SUMS=_SUMS,
            STAGES=_KEPT_STAGES,
            PLAIN=not visible.is_cuda,
            num_warps=_WARPS,
        )
    return Scores(values, block_maxima(values, None, unit=1, size=GROUP, newest=False))
