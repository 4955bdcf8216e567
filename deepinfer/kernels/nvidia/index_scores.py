"""Scores of index keys in Triton, over all entries of a sequence or inside kept blocks, with their maxima by eights.

Products run in FP8 (see `index_codes`); powers of two are multiplied in at the end, which leaves the bf16 roundings of
the contract where the reference has them. Heads are added up in float32, in a fixed order other than the reference's.
Byte offsets are sums of products, not products of sums: Triton 3.6 takes 16 * b + e % 16 for a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.cache import LocateEntries
from deepinfer.kernels.nvidia.fences import fence_copies
from deepinfer.kernels.nvidia.index_codes import Query, load_query
from deepinfer.kernels.nvidia.select import block_maxima
from deepinfer.kernels.ops import CandidateRule, PagedRows

GROUP = 8  # neighbouring entries under one maximum
_ROW_TILE = 4
_KEYS = 64
_SPAN = 4096
_WARPS = 4
_STAGES = 5  # a place in the table is read two tiles before the keys, and those two before they are scored
_MAX_REGISTERS = 128  # four programs to a multiprocessor
_KEPT_KEYS = 128
_KEPT_SPAN = 2048

_WEIGH = tl.constexpr("""
{
    .reg .b32 dots;
    cvt.rn.relu.bf16x2.f32 dots, $2, $1;
    mul.bf16x2 $0, dots, $3;
}
""")


@triton.jit
def _weigh(low, high, pairs, PLAIN: tl.constexpr):
    """relu(dots) rounded to bf16, times bf16 weights, rounded to bf16, for two heads at a time; float32."""
    if PLAIN:
        low = tl.maximum(low, 0.0).to(tl.bfloat16).to(tl.float32) * (pairs << 16).to(tl.float32, bitcast=True)
        high = tl.maximum(high, 0.0).to(tl.bfloat16).to(tl.float32) * (pairs & -65536).to(tl.float32, bitcast=True)
        low, high = low.to(tl.bfloat16).to(tl.float32), high.to(tl.bfloat16).to(tl.float32)
    else:
        both = tl.inline_asm_elementwise(_WEIGH, "=r,r,r,r", [low, high, pairs], dtype=tl.int32, is_pure=True, pack=1)
        low, high = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _scores(
    pool_ptr,
    words_ptr,
    offsets,
    query,
    pairs,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLAIN: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Scores [KEYS, ROWS] as float32, rounded to bf16: dots, weighted dots and their sum are each rounded.

    COPIED: the keys are copied ahead into shared memory.
    """
    KEYS: tl.constexpr = offsets.shape[0]
    PAIRS: tl.constexpr = pairs.shape[0]
    keys = tl.load(pool_ptr + offsets[:, None] + tl.arange(0, WIDTH)[None, :])
    power = tl.load(words_ptr + offsets // 4 + WIDTH // 4)  # a byte of 1 .. 254, then zeros
    if COPIED:
        fence_copies(PLAIN)
    low, high = tl.split(tl.reshape(tl.dot(keys, query), (KEYS, PAIRS, 2)))
    low, high = _weigh(low, high, pairs[None, :], PLAIN)
    total = tl.sum(tl.reshape(low + high, (KEYS, ROWS, PAIRS // ROWS)), 2)
    factor = (power << 23).to(tl.float32, bitcast=True)
    return total.to(tl.bfloat16).to(tl.float32) * factor[:, None]


@triton.jit
def _scan_kernel(
    codes_ptr,
    pair_ptr,
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
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """ROWS neighbouring rows against SPAN entries; rows of one sequence share the loaded keys.

    Entries behind the visible ones of a row, up to the next multiple of KEYS, get scores of no meaning.
    """
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    inside = rows < num_rows
    first = tl.program_id(1) * SPAN
    visible = tl.load(visible_ptr + rows, mask=inside, other=0).to(tl.int32)
    if tl.max(visible, 0) > first:
        query, pairs = load_query(codes_ptr, pair_ptr, first_row, num_rows, ROWS, HEADS, HEAD_BLOCK, WIDTH)
        sequences = tl.load(sequence_ptr + rows, mask=inside, other=-1)
        before = tl.load(sequence_ptr + rows - 1, mask=inside & (tl.arange(0, ROWS) > 0), other=-1)
        for turn in range(tl.minimum(num_rows - first_row, ROWS).to(tl.int32)):
            here = tl.arange(0, ROWS) == turn
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
                scores = _scores(
                    pool_ptr + first_byte, words_ptr + first_byte // 4, offsets, query, pairs, ROWS, WIDTH, PLAIN, True
                )
                place = score_ptr + rows[None, :] * score_stride + entries[:, None]
                tl.store(place, scores, mask=(own > 0)[None, :])


@triton.jit
def _kept_kernel(
    codes_ptr,
    pair_ptr,
    pool_ptr,
    words_ptr,
    table_ptr,
    sequence_ptr,
    visible_ptr,
    group_ptr,
    score_ptr,
    num_rows,
    table_stride,
    PER_BLOCK: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """One row against the entries of SPAN places of its kept blocks, side by side; -inf where there is none.

    `group_ptr`: where each kept block begins in the pool, counted in blocks; -1 = none. All but the row's newest block
    are visible as a whole. The next groups are read while keys are scored.
    """
    NUM: tl.constexpr = NUM_KEPT * SIZE
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPAN
    visible, sequence = tl.load(visible_ptr + row), tl.load(sequence_ptr + row)
    newest = tl.maximum(visible - 1, 0) // SIZE
    visible -= newest * SIZE
    block = tl.load(table_ptr + sequence * table_stride + newest // (PER_BLOCK // SIZE))
    newest = block * (PER_BLOCK // SIZE) + newest % (PER_BLOCK // SIZE)
    query, pairs = load_query(codes_ptr, pair_ptr, row, num_rows, 1, HEADS, HEAD_BLOCK, WIDTH)
    inner, group_ptr = tl.arange(0, KEYS) % SIZE, group_ptr + row * NUM_KEPT
    places = first + tl.arange(0, KEYS)
    group = tl.load(group_ptr + places // SIZE, mask=places < NUM, other=-1).to(tl.int64)
    for start in range(first, tl.minimum(first + SPAN, NUM), KEYS):
        places = start + tl.arange(0, KEYS)
        following = tl.load(group_ptr + (places + KEYS) // SIZE, mask=places + KEYS < NUM, other=-1).to(tl.int64)
        offsets = tl.maximum(group, 0) * (SIZE * NUM_BYTES) + inner * NUM_BYTES
        offsets = tl.multiple_of(offsets, NUM_BYTES & -NUM_BYTES)
        score = tl.reshape(_scores(pool_ptr, words_ptr, offsets, query, pairs, 1, WIDTH, PLAIN, False), (KEYS,))
        seen = (group >= 0) & ((group != newest) | (inner < visible))
        score = tl.where(seen, score, float("-inf"))
        tl.store(score_ptr + row * NUM + places, score, mask=places < NUM)
        group = following


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
            query.weights.view(torch.int32),
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
        per_block = keys.entries_per_block // rule.block_size
        _kept_kernel[(num_rows, triton.cdiv(num_places, _KEPT_SPAN))](
            query.codes,
            query.weights.view(torch.int32),
            keys.pool.view(torch.float8_e4m3fn),
            keys.pool.view(torch.int32),
            keys.block_table,
            row_sequence,
            visible,
            LocateEntries()(kept, row_sequence, keys.block_table, entries_per_block=per_block),
            values,
            num_rows,
            keys.block_table.stride(0),
            PER_BLOCK=keys.entries_per_block,
            NUM_BYTES=keys.record.num_bytes,
            NUM_KEPT=kept.shape[1],
            SIZE=rule.block_size,
            HEADS=num_heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(num_heads)),
            WIDTH=width,
            KEYS=_KEPT_KEYS,
            SPAN=_KEPT_SPAN,
            PLAIN=not visible.is_cuda,
            num_warps=_WARPS,
            num_stages=1,  # more programs to a multiprocessor hide more than copies ahead would
        )
    return Scores(values, block_maxima(values, None, unit=1, size=GROUP, newest=False))
