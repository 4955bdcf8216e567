"""Scores of index keys in Triton, over all entries or inside kept blocks, and the choice of the best.

Dot products of FP4 values are exact in float32, so the bf16 roundings of the contract fall as in the reference.
Byte offsets are sums of products, not products of sums: Triton 3.6 takes 16 * b + e % 16 for a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.nvidia.cache import pack_rows, unpack_rows
from deepinfer.kernels.nvidia.number_formats import decode_e2m1, decode_e8m0
from deepinfer.kernels.nvidia.select import select_largest
from deepinfer.kernels.ops import CandidateRule, Numerics, PagedRows, Selection

_ROW_TILE = 4
_KEYS = 128
_SPAN = 1024
_SCORE_BYTES = 1 << 30  # rows go through in pieces whose scores stay below this


@triton.jit
def _load_query(
    query_ptr,
    weights_ptr,
    rows,
    inside,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Even and odd channels of the queries, [WIDTH / 2, N] each, and their weights [N] float32; N = ROWS * HEAD_BLOCK.

    Heads beyond HEADS weigh 0.
    """
    slots = tl.arange(0, ROWS * HEAD_BLOCK)
    heads = slots % HEAD_BLOCK
    row = tl.reshape(tl.broadcast_to(rows[:, None], (ROWS, HEAD_BLOCK)), (ROWS * HEAD_BLOCK,))
    known = tl.reshape(tl.broadcast_to(inside.to(tl.int32)[:, None], (ROWS, HEAD_BLOCK)), (ROWS * HEAD_BLOCK,))
    wanted = (known > 0) & (heads < HEADS)
    vector = row * HEADS + heads
    place = query_ptr + vector[None, :] * WIDTH + 2 * tl.arange(0, WIDTH // 2)[:, None]
    even = tl.load(place, mask=wanted[None, :], other=0.0)
    odd = tl.load(place + 1, mask=wanted[None, :], other=0.0)
    return even, odd, tl.load(weights_ptr + vector, mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def _load_halves(pool_ptr, offsets, known, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """Even and odd channels (low and high nibbles) of packed keys, bf16 [KEYS, WIDTH / 2] each, exact."""
    GROUPS: tl.constexpr = WIDTH // 32
    groups = tl.arange(0, GROUPS)
    place = pool_ptr + offsets[:, None, None] + 16 * groups[None, :, None] + tl.arange(0, 16)[None, None, :]
    codes = tl.load(place, mask=known[:, None, None], other=0).to(tl.int32)
    scale = tl.load(pool_ptr + offsets[:, None] + WIDTH // 2 + groups[None, :], mask=known[:, None], other=0)
    factor = decode_e8m0(scale.to(tl.int32))[:, :, None]
    even = (decode_e2m1(codes & 15) * factor).to(tl.bfloat16)
    odd = (decode_e2m1(codes >> 4) * factor).to(tl.bfloat16)
    return tl.reshape(even, (KEYS, WIDTH // 2)), tl.reshape(odd, (KEYS, WIDTH // 2))


@triton.jit
def _scores(
    keys_even,
    keys_odd,
    query_even,
    query_odd,
    weights,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """bf16 scores [KEYS, ROWS]: dot products, weighted products and the sum over heads are each rounded to bf16."""
    dots = tl.dot(keys_odd, query_odd, tl.dot(keys_even, query_even)).to(tl.bfloat16).to(tl.float32)
    products = (tl.maximum(dots, 0.0) * weights[None, :]).to(tl.bfloat16).to(tl.float32)
    return tl.sum(tl.reshape(products, (KEYS, ROWS, HEAD_BLOCK)), 2).to(tl.bfloat16)


@triton.jit
def _scan_kernel(
    query_ptr,
    weights_ptr,
    pool_ptr,
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
):
    """ROWS neighbouring rows against SPAN entries; rows of one sequence share the loaded keys."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    first = tl.program_id(1) * SPAN
    visible = tl.load(visible_ptr + rows, mask=inside, other=0).to(tl.int32)
    if tl.max(visible, 0) > first:
        query_even, query_odd, weights = _load_query(
            query_ptr, weights_ptr, rows, inside, ROWS, HEADS, HEAD_BLOCK, WIDTH
        )
        last = tl.minimum(tl.program_id(0) * ROWS + ROWS, num_rows) - 1
        begin, end = tl.load(sequence_ptr + tl.program_id(0) * ROWS), tl.load(sequence_ptr + last)
        sequences = tl.load(sequence_ptr + rows, mask=inside, other=-1)
        for sequence in range(begin, end + 1):
            own = tl.where(sequences == sequence, visible, 0)
            limit = tl.minimum(tl.max(own, 0), first + SPAN)
            for start in range(first, limit, KEYS):
                entries = start + tl.arange(0, KEYS)
                known = entries < limit
                block = tl.load(table_ptr + sequence * table_stride + entries // PER_BLOCK, mask=known, other=0)
                offsets = block * (PER_BLOCK * NUM_BYTES) + entries % PER_BLOCK * NUM_BYTES
                keys_even, keys_odd = _load_halves(pool_ptr, offsets, known, KEYS, WIDTH)
                scores = _scores(keys_even, keys_odd, query_even, query_odd, weights, KEYS, ROWS, HEAD_BLOCK)
                place = score_ptr + rows[None, :] * score_stride + entries[:, None]
                tl.store(place, scores, mask=entries[:, None] < own[None, :])


@triton.jit
def _kept_kernel(
    query_ptr,
    weights_ptr,
    pool_ptr,
    table_ptr,
    sequence_ptr,
    visible_ptr,
    kept_ptr,
    score_ptr,
    table_stride,
    PER_BLOCK: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    KEPT_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One row against the entries of SPAN places of its kept blocks, side by side; -inf where there is none."""
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    visible, sequence = tl.load(visible_ptr + row), tl.load(sequence_ptr + row)
    query_even, query_odd, weights = _load_query(query_ptr, weights_ptr, rows, rows >= 0, 1, HEADS, HEAD_BLOCK, WIDTH)
    first = tl.program_id(1) * SPAN
    for start in range(first, tl.minimum(first + SPAN, NUM_KEPT * KEPT_SIZE), KEYS):
        slots = start + tl.arange(0, KEYS)
        slotted = slots < NUM_KEPT * KEPT_SIZE
        kept = tl.load(kept_ptr + row * NUM_KEPT + slots // KEPT_SIZE, mask=slotted, other=-1) * KEPT_SIZE
        known = (kept >= 0) & (kept + slots % KEPT_SIZE < visible)
        block = tl.load(table_ptr + sequence * table_stride + kept // PER_BLOCK, mask=known, other=0)
        offsets = block * (PER_BLOCK * NUM_BYTES) + kept % PER_BLOCK * NUM_BYTES + slots % KEPT_SIZE * NUM_BYTES
        keys_even, keys_odd = _load_halves(pool_ptr, offsets, known, KEYS, WIDTH)
        scores = _scores(keys_even, keys_odd, query_even, query_odd, weights, KEYS, 1, HEAD_BLOCK)
        scores = tl.where(known[:, None], scores.to(tl.float32), float("-inf"))
        place = score_ptr + row * NUM_KEPT * KEPT_SIZE + slots
        tl.store(place, tl.reshape(scores, (KEYS,)), mask=slotted)


@triton.jit
def _block_maxima_kernel(
    score_ptr, visible_ptr, out_ptr, score_stride, num_blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Largest score of each block of SIZE entries; the newest block with a visible entry is +inf."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_ptr + row).to(tl.int32)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entries = numbers[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    scores = tl.load(score_ptr + row * score_stride + entries, mask=entries < visible, other=float("-inf"))
    best = tl.max(scores.to(tl.float32), 1)
    best = tl.where((numbers == (visible - 1) // SIZE) & (visible > 0), float("inf"), best)
    tl.store(out_ptr + row * num_blocks + numbers, best, mask=numbers < num_blocks)


@dataclass(slots=True, frozen=True)
class IndexSelect:
    """`ops.IndexSelect` in bf16 over packed index records."""

    numerics: Numerics

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        keys: PagedRows,
        *,
        sequence_starts: Tensor,  # noqa: ARG002  the row's sequence says it all
        row_sequence: Tensor,
        visible: Tensor,
        num_selected: int,
        candidates: Tensor | None,
        rule: CandidateRule | None,
    ) -> Selection:
        width = query.shape[2]
        query = unpack_rows(pack_rows(query, kind="index"), kind="index", width=width, dtype=torch.bfloat16)
        weights = weights.contiguous()
        if candidates is not None:
            assert rule is not None, "candidates are blocks: their size is missing"
            return _select_inside(query, weights, keys, row_sequence, visible, num_selected, candidates, rule)
        capacity = keys.block_table.shape[1] * keys.entries_per_block
        piece = max(_ROW_TILE, _SCORE_BYTES // (2 * capacity) // _ROW_TILE * _ROW_TILE)
        entries, kept = [], []
        for start in range(0, max(1, len(query)), piece):
            rows = slice(start, start + piece)
            scores = _scan(query[rows], weights[rows], keys, row_sequence[rows], visible[rows])
            entries.append(select_largest(scores, visible[rows], num_selected))
            if rule is not None:
                kept.append(_keep_blocks(scores, visible[rows], rule))
        return Selection(_join(entries), _join(kept) if kept else None)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scan(query: Tensor, weights: Tensor, keys: PagedRows, row_sequence: Tensor, visible: Tensor) -> Tensor:
    """bf16 [T, C] for every entry the block table can hold; unwritten where an entry is not visible."""
    num_rows, num_heads, width = query.shape
    capacity = keys.block_table.shape[1] * keys.entries_per_block
    scores = torch.empty(num_rows, capacity, dtype=torch.bfloat16, device=query.device)
    if num_rows:
        _scan_kernel[(triton.cdiv(num_rows, _ROW_TILE), triton.cdiv(capacity, _SPAN))](
            query,
            weights,
            keys.pool,
            keys.block_table,
            row_sequence,
            visible,
            scores,
            num_rows,
            keys.block_table.stride(0),
            scores.stride(0),
            PER_BLOCK=keys.entries_per_block,
            NUM_BYTES=keys.record.num_bytes,
            HEADS=num_heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(num_heads)),
            WIDTH=width,
            ROWS=_ROW_TILE,
            KEYS=_KEYS,
            SPAN=_SPAN,
        )
    return scores


def _keep_blocks(scores: Tensor, visible: Tensor, rule: CandidateRule) -> Tensor:
    num_rows, capacity = scores.shape
    num_blocks = triton.cdiv(capacity, rule.block_size)
    best = torch.empty(num_rows, num_blocks, dtype=torch.bfloat16, device=scores.device)
    if num_rows:
        _block_maxima_kernel[(num_rows, triton.cdiv(num_blocks, 256))](
            scores, visible, best, scores.stride(0), num_blocks, SIZE=rule.block_size, BLOCK=256
        )
    limits = (visible + rule.block_size - 1) // rule.block_size
    return select_largest(best, limits, rule.num_blocks)


def _select_inside(
    query: Tensor,
    weights: Tensor,
    keys: PagedRows,
    row_sequence: Tensor,
    visible: Tensor,
    num_selected: int,
    kept: Tensor,
    rule: CandidateRule,
) -> Selection:
    """The kept blocks ascend, so the order of places is the order of entries."""
    assert keys.entries_per_block % rule.block_size == 0, "a candidate block must not cross cache blocks"
    num_rows, num_heads, width = query.shape
    num_slots = kept.shape[1] * rule.block_size
    scores = torch.empty(num_rows, num_slots, dtype=torch.bfloat16, device=query.device)
    kept = kept.contiguous()
    if num_rows:
        _kept_kernel[(num_rows, triton.cdiv(num_slots, _SPAN))](
            query,
            weights,
            keys.pool,
            keys.block_table,
            row_sequence,
            visible,
            kept,
            scores,
            keys.block_table.stride(0),
            PER_BLOCK=keys.entries_per_block,
            NUM_BYTES=keys.record.num_bytes,
            NUM_KEPT=kept.shape[1],
            KEPT_SIZE=rule.block_size,
            HEADS=num_heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(num_heads)),
            WIDTH=width,
            KEYS=_KEYS,
            SPAN=_SPAN,
        )
    slots = select_largest(scores, torch.full_like(visible, num_slots), num_selected)
    known = slots.clamp_min(0)
    entries = kept.gather(1, known // rule.block_size) * rule.block_size + known % rule.block_size
    return Selection(torch.where(slots < 0, -1, entries), kept)


IMPLEMENTATIONS = (triton_kernel("index_select", IndexSelect, dtypes=BF16, released_numerics_only=True),)
