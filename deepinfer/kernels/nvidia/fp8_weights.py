"""Weights for FP8 products with one power-of-two scale per 128 x 128 tile, made once at load.

A power-of-two scale only shifts exponents, so mantissas are kept and only values that fall below the smallest normal
E4M3 number can change. FP4 values have one bit of mantissa: as long as the scales of a tile differ by 2^12 at most,
nothing changes at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.casts import GROUP
from deepinfer.kernels.nvidia.number_formats import decode_e8m0, widen_e2m1
from deepinfer.kernels.reference.quantize import dequantize_fp8_tiles

_E4M3_MAX = 448.0
_PIECE_ROWS = 64 * GROUP  # that are float32 at the same time


@triton.jit
def _recast_kernel(
    packed_ptr, scale_ptr, codes_ptr, factor_ptr, lost_ptr, rows, columns, TILE: tl.constexpr, PLAIN: tl.constexpr
):
    """One tile of TILE x TILE values: all groups move to one power of two, 2^12 below the largest group's."""
    expert = tl.program_id(2).to(tl.int64)
    row = expert * rows + tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.program_id(0) * TILE
    groups = tl.arange(0, TILE // 32)
    scale = tl.load(scale_ptr + row[:, None] * (columns // 32) + first // 32 + groups[None, :]).to(tl.int32)
    byte = first // 2 + 16 * groups[None, :, None] + tl.arange(0, 16)[None, None, :]
    packed = tl.load(packed_ptr + row[:, None, None] * (columns // 2) + byte)
    top = tl.maximum(tl.max(tl.max(scale, 1), 0), 7)
    shift = scale - top + 12
    low, high = widen_e2m1(packed, shift, PLAIN)
    codes = tl.reshape(tl.join(low, high), (TILE, TILE))
    tl.store(codes_ptr + row[:, None] * columns + first + tl.arange(0, TILE)[None, :], codes)
    place = expert * (rows // TILE) + tl.program_id(1)
    tl.store(factor_ptr + place * (columns // TILE) + tl.program_id(0), decode_e8m0(top - 6))
    values = tl.max((packed & 0x77).to(tl.int32), 2)
    lost = tl.max(tl.max(((shift < 0) & (values > 0)).to(tl.int32), 1), 0)
    if lost > 0:
        tl.store(lost_ptr, 1)


@dataclass(slots=True, frozen=True)
class Fp8Weight:
    """`codes` float8_e4m3fn [..., N, K] and float32 `scale` [..., ceil(N / 128), K / 128]."""

    codes: Tensor
    scale: Tensor


@dataclass(slots=True, frozen=True)
class Loss:
    """What re-blocking changed: the share of elements, and the relative norm of the difference."""

    changed_share: float
    relative_norm: float


def reblock_fp8(weight: Tensor, scale: Tensor) -> tuple[Fp8Weight, Loss]:
    """Re-block a released FP8 matrix [N, K] with 32 x 32 tiles; K a multiple of 128."""
    values = dequantize_fp8_tiles(weight, scale)
    blocked = _block(values)
    return blocked, _loss(values, blocked)


def round_to_fp8(weight: Tensor) -> Fp8Weight:
    """The nearest FP8 values of a matrix [N, K] of any numbers, K a multiple of 128; a piece at a time."""
    pieces = [_block(piece.float()) for piece in weight.split(_PIECE_ROWS)]
    return Fp8Weight(torch.cat([piece.codes for piece in pieces]), torch.cat([piece.scale for piece in pieces]))


def recast_fp4(packed: Tensor, scale: Tensor) -> Fp8Weight | None:
    """FP8 weights of all experts' released FP4 matrices [E, N, K / 2], N and K multiples of 128; exact.

    None where that can't be: the scales of a tile's groups differ by more than 2^12.
    """
    num_experts, rows, half = packed.shape
    codes = torch.empty(num_experts, rows, 2 * half, dtype=torch.float8_e4m3fn, device=packed.device)
    factor = torch.empty(num_experts, rows // GROUP, 2 * half // GROUP, dtype=torch.float32, device=packed.device)
    is_lost = torch.zeros(1, dtype=torch.int32, device=packed.device)
    _recast_kernel[(2 * half // GROUP, rows // GROUP, num_experts)](
        packed.contiguous(),
        scale.contiguous(),
        codes.view(torch.uint8),
        factor,
        is_lost,
        rows,
        2 * half,
        TILE=GROUP,
        PLAIN=not packed.is_cuda,
    )
    return None if int(is_lost) else Fp8Weight(codes, factor)


def dequantise(weight: Fp8Weight) -> Tensor:
    """float32 [N, K]."""
    rows, columns = weight.codes.shape
    factors = weight.scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)
    return weight.codes.float() * factors[:, :columns]


def _block(values: Tensor) -> Fp8Weight:
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % GROUP))
    tiles = padded.view(-1, GROUP, columns // GROUP, GROUP)
    largest = tiles.abs().amax((1, 3)).clamp_min(2.0**-100)
    # the smallest power of two that brings the largest value to 448 at most
    mantissa, exponent = torch.frexp(largest / _E4M3_MAX)
    factor = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    codes = (tiles / factor[:, None, :, None]).to(torch.float8_e4m3fn).view(-1, columns)[:rows].contiguous()
    return Fp8Weight(codes, factor)


def _loss(values: Tensor, blocked: Fp8Weight) -> Loss:
    difference = dequantise(blocked) - values
    norm = float(values.norm())
    return Loss(
        changed_share=float((difference != 0).float().mean()),
        relative_norm=float(difference.norm()) / norm if norm else 0.0,
    )
