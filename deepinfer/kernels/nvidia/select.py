"""Exact selection of the k largest bf16 scores of a row, ascending by entry, ties to the lower entry.

Three passes over a row that stays in the L2 cache: a histogram of the upper key byte, one of the lower byte inside the
deciding upper byte, and a compaction in order of the entries. No atomics, no sort: the result has one possible value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _keys(score_ptr, entries, inside):
    """16-bit keys in the order of the scores; 0 where nothing may be chosen (-inf, NaN below, outside)."""
    bits = tl.load(score_ptr + entries, mask=inside, other=float("-inf")).to(tl.int16, bitcast=True).to(tl.int32)
    bits = bits & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)  # -0 equals 0
    key = tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)
    return tl.where(key > 0x7F, key, 0)  # 0x7F is -inf


@triton.jit
def _deciding_bin(counts, wanted):
    """The largest bin with at least `wanted` keys in it and above (-1: none), and how many of it are wanted."""
    bins = tl.arange(0, 256)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    found = tl.max(tl.where((above + counts >= wanted) & (above < wanted), bins, -1), 0)
    return found, wanted - tl.sum(tl.where(bins == found, above, 0), 0)


@triton.jit
def _select_kernel(score_ptr, limit_ptr, out_ptr, score_stride, NUM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    score_ptr += row * score_stride
    upper = tl.zeros((256,), tl.int32)
    for start in range(0, limit, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        keys = _keys(score_ptr, entries, entries < limit)
        upper += tl.histogram(keys >> 8, 256, mask=keys > 0)
    high, wanted = _deciding_bin(upper, NUM)
    threshold, num_ties = 0, 0
    if high >= 0:
        lower = tl.zeros((256,), tl.int32)
        for start in range(0, limit, BLOCK):
            entries = start + tl.arange(0, BLOCK)
            keys = _keys(score_ptr, entries, entries < limit)
            lower += tl.histogram(keys & 255, 256, mask=(keys > 0) & ((keys >> 8) == high))
        low, num_ties = _deciding_bin(lower, wanted)
        threshold = high * 256 + low
    written, ties = 0, 0
    for start in range(0, limit, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        keys = _keys(score_ptr, entries, entries < limit)
        equal = (keys == threshold) & (keys > 0)
        # one running count of both kinds: larger keys in the lower half of the word, equal ones in the upper
        both = tl.where(keys > threshold, 1, tl.where(equal, 0x10000, 0))
        counts = tl.cumsum(both, 0)
        larger, ties_here = counts & 0xFFFF, ties + (counts >> 16)
        taken = (keys > threshold) | (equal & (ties_here <= num_ties))
        place = written + larger + tl.minimum(ties_here, num_ties) - 1
        tl.store(out_ptr + row * NUM + place, entries.to(tl.int64), mask=taken)
        total = tl.sum(both, 0)
        written += total & 0xFFFF
        ties += total >> 16
    written += tl.minimum(ties, num_ties)
    for start in range(0, NUM, BLOCK):
        place = start + tl.arange(0, BLOCK)
        empty = tl.full((BLOCK,), -1, tl.int64)
        tl.store(out_ptr + row * NUM + place, empty, mask=(place >= written) & (place < NUM))


def select_largest(scores: Tensor, limits: Tensor, num_selected: int) -> Tensor:
    """Entries [T, k] int64 of the largest of `scores` [T, C] bf16 before `limits` [T]; -inf never; -1 behind."""
    out = torch.empty(scores.shape[0], num_selected, dtype=torch.int64, device=scores.device)
    if scores.shape[0]:
        _select_kernel[(scores.shape[0],)](
            scores, limits, out, scores.stride(0), NUM=num_selected, BLOCK=_BLOCK, num_warps=8
        )
    return out
