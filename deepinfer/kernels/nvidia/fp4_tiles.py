"""FP4 weights of experts in the order in which a product reads them, packed once at load; nothing is rounded.

A matrix [N, K] becomes tiles of 128 rows, a tile blocks of 128 columns, 8 KiB in one piece each. Word c of a row of a
block (16 bits) holds columns c, 32 + c, 64 + c and 96 + c, one of each group of 32 that shares a scale. Their bits lie
so that a shift and a mask move the sign to bit 15 and the other three to bits 8 to 6: as bf16 that is the value times
2^-126, zero and 0.5 included. The scales become the bf16 factors that undo it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128
BLOCK = 128
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(BLOCK // 4)  # of a row of a block
_MAX_SCALE = 128  # a factor has the exponent of the scale + 126, 254 at most

# $4: words of two neighbours; $5, $7, $9, $11: factors of their columns. The last column's bits lie in three places.
_WIDEN = tl.constexpr("""
{
    .reg .b32 moved, bits;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 moved, $4, 3;
    and.b32 $1, moved, 0x81C081C0;
    shl.b32 moved, $4, 6;
    and.b32 $2, moved, 0x81C081C0;
    shl.b32 moved, $4, 1;
    and.b32 bits, moved, 0x80008000;
    shr.b32 moved, $4, 5;
    lop3.b32 bits, moved, 0x01000100, bits, 0xEA;
    shr.b32 moved, $4, 4;
    lop3.b32 $3, moved, 0x00C000C0, bits, 0xEA;
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $7;
    mul.rn.bf16x2 $2, $2, $9;
    mul.rn.bf16x2 $3, $3, $11;
}
""")


@dataclass(slots=True, frozen=True)
class Fp4Tiles:
    """`words` int16 [E, tiles, blocks, 128, 32]; `factors` int32 [E, tiles, blocks, 128], a byte for each 32 columns.

    The weights are `lift` times what these give: 1, unless a scale is above 2.
    """

    words: Tensor
    factors: Tensor
    lift: float


@triton.jit
def _place_code(code, COLUMN: tl.constexpr):
    """A 4-bit code (int32) where the word keeps it; COLUMN 0 to 3."""
    sign, size = code >> 3, code & 7
    if COLUMN == 0:
        bits = (sign << 15) | (size << 6)
    elif COLUMN == 1:
        bits = (sign << 12) | (size << 3)
    elif COLUMN == 2:
        bits = (sign << 9) | size
    else:
        bits = (sign << 14) | ((size >> 2) << 13) | ((size & 3) << 10)
    return bits


@triton.jit
def _bf16_bits(word, COLUMN: tl.constexpr):
    """The inverse as bits of bf16 (int32), as `_WIDEN` does it for two words at a time."""
    if COLUMN < 3:
        bits = (word << (3 * COLUMN)) & 0x81C0
    else:
        bits = ((word << 1) & 0x8000) | ((word >> 5) & 0x0100) | ((word >> 4) & 0x00C0)
    return bits


@triton.jit
def _widen_plain(words, factors, COLUMN: tl.constexpr):
    value = (_bf16_bits(words.to(tl.int32), COLUMN) << 16).to(tl.float32, bitcast=True)
    factor = (((factors >> (8 * COLUMN)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return (value * factor[:, None]).to(tl.bfloat16)


@triton.jit
def _factor_pairs(factors, COLUMN: tl.constexpr):
    """Bits of a bf16 factor, twice (int32)."""
    return (((factors >> (8 * COLUMN)) & 0xFF) * 0x00800080)[:, None]


@triton.jit
def widen_words(words, factors, PLAIN: tl.constexpr):
    """bf16 values of the four groups of 32 columns of `words` int16 [N, 32]; `factors` int32 [N]."""
    if PLAIN:
        values = (
            _widen_plain(words, factors, 0),
            _widen_plain(words, factors, 1),
            _widen_plain(words, factors, 2),
            _widen_plain(words, factors, 3),
        )
    else:
        values = tl.inline_asm_elementwise(
            _WIDEN,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [
                words,
                _factor_pairs(factors, 0),
                _factor_pairs(factors, 1),
                _factor_pairs(factors, 2),
                _factor_pairs(factors, 3),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return values


@triton.jit
def _pack_kernel(
    packed_ptr,
    scale_ptr,
    words_ptr,
    factor_ptr,
    lift,
    N,
    K,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of ROWS rows of one matrix, which become rows PART * ROWS and on of the tile."""
    expert, tile, block = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, _WORDS)
    words = tl.zeros((ROWS, _WORDS), tl.int32)
    factors = tl.zeros((ROWS,), tl.int32)
    for group in tl.static_range(4):
        place = block * _BLOCK + group * _WORDS + column
        known = (row < N)[:, None] & (place < K)[None, :]
        byte = tl.load(packed_ptr + (expert * N + row)[:, None] * (K // 2) + (place // 2)[None, :], mask=known, other=0)
        code = (byte.to(tl.int32) >> (column % 2 * 4)[None, :]) & 15
        words |= _place_code(code, group)
        number = block * 4 + group
        known = row < tl.where(number < K // 32, N, 0)
        scale = tl.load(scale_ptr + (expert * N + row) * (K // 32) + number, mask=known, other=0).to(tl.int32)
        factors |= tl.maximum(scale + 126 - lift, 0) << (8 * group)
    first = ((expert * tl.num_programs(1) + tile) * tl.num_programs(0) + block) * _TILE_ROWS
    target = first + PART * ROWS + tl.arange(0, ROWS)
    tl.store(words_ptr + target[:, None] * _WORDS + column[None, :], words.to(tl.int16))
    tl.store(factor_ptr + target, factors)


def pack_fp4(*matrices: tuple[Tensor, Tensor]) -> Fp4Tiles:
    """Tiles of one or two matrices of all experts as released: packed [E, N, K / 2] and scales [E, N, K / 32], uint8.

    A tile has as many rows of each, those of the first in front; rows and columns that are missing count as zeros.
    Exact, unless one scale is above 2 and another more than 2^130 times smaller.
    """
    num_experts, n, half = matrices[0][0].shape
    rows, device = TILE_ROWS // len(matrices), matrices[0][0].device
    grid = (triton.cdiv(2 * half, BLOCK), triton.cdiv(n, rows), num_experts)
    shape = (num_experts, grid[1], grid[0], TILE_ROWS)
    words = torch.empty(*shape, BLOCK // 4, dtype=torch.int16, device=device)
    factors = torch.empty(shape, dtype=torch.int32, device=device)
    lift = max(0, *(int(scale.max()) - _MAX_SCALE for _, scale in matrices))
    for part, (packed, scale) in enumerate(matrices):
        _pack_kernel[grid](
            packed.contiguous(), scale.contiguous(), words, factors, lift, n, 2 * half, PART=part, ROWS=rows
        )
    return Fp4Tiles(words, factors, 2.0**lift)
