"""Index keys and queries as FP8 vectors, in Triton: the values of the released FP4 format, ready for matrix units.

Every FP4 value times a power of two is an E4M3 number, so all groups of 32 of a vector can share one power of two as
long as their scales lie within 2^12; smaller groups count as zero. A record takes twice the bytes of the packed one,
and needs no decoding when it is scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.number_formats import (
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e8m0_ceiling,
    group_maxima,
    look_up,
    size_tables,
    spread,
)
from deepinfer.kernels.ops import RecordFormat

_TAIL = 16  # bytes of a record behind its codes: the power of two, then zeros, so that records lie aligned
_ROWS = 4


@triton.jit
def _quantise(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """E4M3 codes (uint8) of float32 values [ROWS, WIDTH] rounded to FP4, and the E8M0 byte (int32) of each row."""
    GROUPS: tl.constexpr = WIDTH // 32
    largest = tl.maximum(group_maxima(values, ROWS, GROUPS, 32), 7.052966104933725e-38)  # 6 * 2^-126
    scale = encode_e8m0_ceiling(largest * (1.0 / 6.0))
    codes = encode_e2m1(tl.div_rn(values, spread(decode_e8m0(scale), ROWS, GROUPS, 32)))
    top = tl.maximum(tl.max(scale, 1), 7)
    lower, upper = size_tables(scale - top[:, None] + 12)
    return look_up(codes, spread(lower, ROWS, GROUPS, 32), spread(upper, ROWS, GROUPS, 32)), top - 6


@triton.jit
def _pack_kernel(
    x_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, NUM_BYTES: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    values = tl.load(x_ptr + rows[:, None] * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    codes, power = _quantise(values, ROWS, WIDTH)
    tl.store(out_ptr + rows[:, None] * NUM_BYTES + columns, codes, mask=inside)
    tail = tl.arange(0, TAIL)[None, :]
    last = tl.where(tail == 0, power[:, None], 0).to(tl.uint8)
    tl.store(out_ptr + rows[:, None] * NUM_BYTES + WIDTH + tail, last, mask=inside)


@triton.jit
def _unpack_kernel(records_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, NUM_BYTES: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    columns = tl.arange(0, WIDTH)[None, :]
    codes = tl.load(records_ptr + rows[:, None] * NUM_BYTES + columns, mask=inside[:, None], other=0)
    power = tl.load(records_ptr + rows * NUM_BYTES + WIDTH, mask=inside, other=0).to(tl.int32)
    values = decode_e4m3(codes) * decode_e8m0(power)[:, None]
    tl.store(out_ptr + rows[:, None] * WIDTH + columns, values, mask=inside[:, None])


@triton.jit
def _query_kernel(
    query_ptr,
    weights_ptr,
    codes_ptr,
    factor_ptr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Quantise one row's queries; the weight of a head takes in its power of two.

    Weights that are no finite numbers, or above 2^100, become 0: they would spoil the rows beside them.
    """
    row = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH)
    inside = heads < HEADS
    place = (row * HEADS + heads)[:, None] * WIDTH + columns[None, :]
    values = tl.load(query_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
    codes, power = _quantise(values, HEAD_BLOCK, WIDTH)
    tl.store(codes_ptr + place, codes, mask=inside[:, None])
    weight = tl.load(weights_ptr + row * HEADS + heads, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(tl.abs(weight) < 1.2676506002282294e30, weight, 0.0)
    tl.store(factor_ptr + row * HEADS + heads, weight * decode_e8m0(power), mask=inside)


@triton.jit
def load_query(
    codes_ptr,
    pair_ptr,
    first_row,
    num_rows,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Queries of neighbouring rows, FP8 [WIDTH, N], and bf16 weights of two heads each, int32 [N / 2].

    N = ROWS * HEAD_BLOCK; heads beyond HEADS weigh 0. `pair_ptr`: the weights as words of two.
    """
    slots = tl.arange(0, ROWS * HEAD_BLOCK)
    row, head = first_row + slots // HEAD_BLOCK, slots % HEAD_BLOCK
    known = ((row < num_rows) & (head < HEADS))[:, None]
    place = (row * HEADS + head)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    pairs = tl.arange(0, ROWS * HEAD_BLOCK // 2)
    row, pair = first_row + pairs // (HEAD_BLOCK // 2), pairs % (HEAD_BLOCK // 2)
    weighed = (row < num_rows) & (pair < HEADS // 2)
    weights = tl.load(pair_ptr + row * (HEADS // 2) + pair, mask=weighed, other=0)
    return tl.trans(tl.load(codes_ptr + place, mask=known, other=0.0)), weights


@dataclass(slots=True, frozen=True)
class Query:
    """Quantised queries of T rows: `codes` float8_e4m3fn [T, Hi, di] and head `weights` bf16 [T, Hi]; Hi is even."""

    codes: Tensor
    weights: Tensor

    def piece(self, rows: slice) -> Query:
        """Some of the rows."""
        return Query(self.codes[rows], self.weights[rows])


def quantise_query(query: Tensor, weights: Tensor) -> Query:
    """Quantise queries [T, Hi, di] and take in their weights [T, Hi]."""
    num_rows, num_heads, width = query.shape
    codes = torch.empty(num_rows, num_heads, width, dtype=torch.float8_e4m3fn, device=query.device)
    factors = torch.empty(num_rows, num_heads, dtype=torch.bfloat16, device=query.device)
    if num_rows:
        _query_kernel[(num_rows,)](
            query.contiguous(),
            weights.contiguous(),
            codes.view(torch.uint8),
            factors,
            HEADS=num_heads,
            HEAD_BLOCK=triton.next_power_of_2(num_heads),
            WIDTH=width,
        )
    return Query(codes, factors)


def index_record(width: int) -> RecordFormat:
    """Records of index keys: `width` E4M3 codes, the E8M0 byte of their power of two, zeros up to 16 bytes."""
    num_bytes = width + _TAIL
    return RecordFormat(f"index:wide{num_bytes}", width, num_bytes, _pack, partial(_unpack, width=width))


def _pack(values: Tensor, *, out: Tensor | None = None) -> Tensor:
    width = values.shape[-1]
    num_rows, num_bytes = values.numel() // width, width + _TAIL
    if out is None:
        out = torch.empty(*values.shape[:-1], num_bytes, dtype=torch.uint8, device=values.device)
    assert out.is_contiguous()
    if num_rows:
        _pack_kernel[(triton.cdiv(num_rows, _ROWS),)](
            values.contiguous(), out, num_rows, WIDTH=width, NUM_BYTES=num_bytes, ROWS=_ROWS, TAIL=_TAIL
        )
    return out


def _unpack(records: Tensor, *, width: int) -> Tensor:
    out = torch.empty(*records.shape[:-1], width, dtype=torch.float32, device=records.device)
    num_rows = out.numel() // width
    if num_rows:
        _unpack_kernel[(triton.cdiv(num_rows, _ROWS),)](
            records.contiguous(), out, num_rows, WIDTH=width, NUM_BYTES=width + _TAIL, ROWS=_ROWS
        )
    return out
