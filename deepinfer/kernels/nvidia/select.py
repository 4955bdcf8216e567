"""Exact selection of the k largest bf16 values of a row, ascending by number, ties to the lower number.

Wide rows are narrowed first: the k largest values lie in the k groups with the largest maxima (of equal maxima the
lower groups), so a choice among maxima by eights leaves 8 k values, whatever the data. What remains is held by one
program, which finds the k-th largest key bit by bit and counts its way to the places: no atomics, no sort, and no path
that depends on the data.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FAN = 8  # values under one maximum of the next level
_WIDEST = 16384  # values that one program chooses from
_NARROW = 4096  # wider rows are narrowed, though one program could hold them
_PIECE = 2048
_VALUES_PER_THREAD = 16


@triton.jit
def _numbers(parent_ptr, first, NUM_PARENTS: tl.constexpr, FAN: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of the values at places `first` on: the places themselves, or children of parents; negative = none."""
    if NUM_PARENTS > 0:
        places = first // FAN + tl.arange(0, BLOCK // FAN)
        parents = tl.load(parent_ptr + places, mask=places < NUM_PARENTS, other=-1)
        numbers = tl.reshape(parents[:, None] * FAN + tl.arange(0, FAN)[None, :], (BLOCK,))
    else:
        numbers = first + tl.arange(0, BLOCK)
    return tl.max_contiguous(tl.multiple_of(numbers, FAN), FAN)


@triton.jit
def _keys(value_ptr, numbers, limit, width, WHOLE: tl.constexpr, FAN: tl.constexpr):
    """16-bit keys in the order of the values; 0 where nothing may be chosen (-inf, NaN below, outside).

    WHOLE: `width` is a multiple of FAN, so that FAN neighbours can be one load.
    """
    inside = (numbers >= 0) & (numbers < limit)
    if WHOLE:
        readable = tl.max_constancy((numbers >= 0) & (numbers < width), FAN)
    else:
        readable = inside
    bits = tl.load(value_ptr + numbers, mask=readable, other=float("-inf")).to(tl.int16, bitcast=True).to(tl.int32)
    bits = bits & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)  # -0 equals 0
    key = tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)
    return tl.where((key > 0x7F) & inside, key, 0)  # 0x7F is -inf


@triton.jit
def _choose_kernel(
    value_ptr,
    visible_ptr,
    parent_ptr,
    block_ptr,
    out_ptr,
    stride,
    width,
    UNIT: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    FAN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One row. Only the children of NUM_PARENTS parents are looked at, if there are any; -1 = no parent.

    A value stands for UNIT entries, of which `visible` count (UNIT 0: all count). With NUM_BLOCKS, numbers are places
    in blocks of SIZE whose numbers `block_ptr` holds. All keys are held for the search of the threshold; then pieces of
    PIECE are read again and what is chosen of them is written, in order.
    """
    row = tl.program_id(0).to(tl.int64)
    value_ptr += row * stride
    parent_ptr += row * NUM_PARENTS
    out_ptr += row * NUM
    limit = width
    if UNIT > 0:
        limit = tl.minimum((tl.load(visible_ptr + row).to(tl.int32) + UNIT - 1) // UNIT, width)
    numbers = _numbers(parent_ptr, 0, NUM_PARENTS, FAN, BLOCK)
    keys = _keys(value_ptr, numbers, limit, width, WHOLE, FAN)
    threshold = 0  # the NUM-th largest key; 0: there are fewer
    for step in tl.static_range(16):
        trial = threshold | (0x8000 >> step)
        threshold = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= NUM, trial, threshold)
    num_ties = NUM - tl.sum((keys > threshold).to(tl.int32), 0)
    written, ties = 0, 0
    for first in range(0, BLOCK, PIECE):
        here = _numbers(parent_ptr, first, NUM_PARENTS, FAN, PIECE)
        piece = _keys(value_ptr, here, limit, width, WHOLE, FAN)
        larger = piece > threshold
        equal = (piece == threshold) & (piece > 0)
        # one running count of both kinds: larger keys in the lower half of the word, equal ones in the upper
        both = tl.where(larger, 1, tl.where(equal, 0x10000, 0))
        counts, total = tl.cumsum(both, 0), tl.sum(both, 0)
        ties_here = ties + (counts >> 16)
        taken = larger | (equal & (ties_here <= num_ties))
        place = written + (counts & 0xFFFF) + tl.minimum(ties_here, num_ties) - 1
        if NUM_BLOCKS > 0:
            blocks = tl.load(block_ptr + row * NUM_BLOCKS + here // SIZE, mask=taken, other=0)
            here = blocks.to(tl.int32) * SIZE + here % SIZE
        tl.store(out_ptr + place, here.to(out_ptr.dtype.element_ty), mask=taken)
        written += total & 0xFFFF
        ties += total >> 16
    written += tl.minimum(ties, num_ties)
    for first in tl.static_range(0, NUM, PIECE):
        places = first + tl.arange(0, PIECE)
        empty = tl.full((PIECE,), -1, out_ptr.dtype.element_ty)
        tl.store(out_ptr + places, empty, mask=(places >= written) & (places < NUM))


@triton.jit
def _maxima_kernel(
    value_ptr,
    visible_ptr,
    out_ptr,
    stride,
    width,
    num_out,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    NEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Largest of each SIZE neighbours, values of UNIT entries each (0: all count); NEWEST: the last visible is +inf.

    WHOLE: `width` is a multiple of SIZE, so that the neighbours are one load.
    """
    row = tl.program_id(0).to(tl.int64)
    limit = width
    if UNIT > 0:
        limit = tl.minimum((tl.load(visible_ptr + row).to(tl.int32) + UNIT - 1) // UNIT, width)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    children = numbers[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    readable = numbers[:, None] * SIZE < width if WHOLE else children < limit
    values = tl.load(value_ptr + row * stride + children, mask=readable, other=float("-inf")).to(tl.float32)
    best = tl.max(tl.where(children < limit, values, float("-inf")), 1)
    if NEWEST:
        best = tl.where((numbers == (limit - 1) // SIZE) & (limit > 0), float("inf"), best)
    tl.store(out_ptr + row * num_out + numbers, best, mask=numbers < num_out)


def block_maxima(values: Tensor, visible: Tensor | None, *, unit: int, size: int, newest: bool) -> Tensor:
    """bf16 [T, ceil(C / size)]: the largest of `size` (a power of two) neighbouring values [T, C] of `unit` entries.

    Entries from `visible` [T] on don't count; None: all do. With `newest` the last block with a visible entry is +inf.
    """
    num_rows, width = values.shape
    num_out = triton.cdiv(width, size)
    out = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device=values.device)
    if num_rows:
        block = max(1, 2048 // size)
        _maxima_kernel[(num_rows, triton.cdiv(num_out, block))](
            values,
            values if visible is None else visible,
            out,
            values.stride(0),
            width,
            num_out,
            UNIT=0 if visible is None else unit,
            SIZE=size,
            NEWEST=newest,
            BLOCK=block,
            WHOLE=width % size == 0,
        )
    return out


def select_largest(
    values: Tensor,
    num_selected: int,
    *,
    visible: Tensor | None = None,
    unit: int = 1,
    maxima: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """Numbers [T, k] int64 of the largest of `values` bf16 [T, C]; -inf never; -1 behind.

    `visible` [T] entries of a row count, `unit` entries to a value; None: all. `maxima` [T, ceil(C / 8)]: the largest
    of eight neighbours, if they are known. With `blocks` [T, n] (contiguous) of `block_size` values each, a value's
    number is that of its entry.
    """
    levels, units = [values], [unit]
    narrow = max(_NARROW, FAN * num_selected)
    while levels[-1].shape[1] > narrow:
        if len(levels) > 1 or maxima is None:
            maxima = block_maxima(levels[-1], visible, unit=units[-1], size=FAN, newest=False)
        levels.append(maxima)
        units.append(units[-1] * FAN)
    parents = None
    for level, entries in zip(reversed(levels[1:]), reversed(units[1:]), strict=True):
        parents = _choose(level, num_selected, visible, entries, parents, None, 1, torch.int32)
    return _choose(values, num_selected, visible, unit, parents, blocks, block_size, torch.int64)


def _choose(
    values: Tensor,
    num_selected: int,
    visible: Tensor | None,
    unit: int,
    parents: Tensor | None,
    blocks: Tensor | None,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    num_rows, width = values.shape
    out = torch.empty(num_rows, num_selected, dtype=dtype, device=values.device)
    if num_rows:
        looked_at = width if parents is None else num_selected * FAN
        block = max(32, triton.next_power_of_2(looked_at))
        assert block <= _WIDEST, f"a choice of {num_selected} out of {looked_at} values is too wide for one program"
        _choose_kernel[(num_rows,)](
            values,
            values if visible is None else visible,
            values if parents is None else parents,
            values if blocks is None else blocks,
            out,
            values.stride(0),
            width,
            UNIT=0 if visible is None else unit,
            NUM_PARENTS=0 if parents is None else num_selected,
            FAN=FAN,
            NUM_BLOCKS=0 if blocks is None else blocks.shape[1],
            SIZE=block_size,
            NUM=num_selected,
            BLOCK=block,
            PIECE=min(block, _PIECE),
            WHOLE=width % FAN == 0,
            num_warps=min(16, max(1, block // (32 * _VALUES_PER_THREAD))),
        )
    return out
