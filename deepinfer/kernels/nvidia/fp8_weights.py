"""Weights for FP8 products with one power-of-two scale per 128 x 128 tile, made once at load.

A power-of-two scale only shifts exponents, so mantissas are kept and only values that fall below the smallest normal
E4M3 number can change. FP4 values have one bit of mantissa: as long as the scales of a tile differ by 2^11 at most,
nothing changes at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.nvidia.casts import GROUP
from deepinfer.kernels.reference.quantize import dequantize_fp4, dequantize_fp8_tiles

_E4M3_MAX = 448.0


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


def recast_fp4(packed: Tensor, scale: Tensor) -> tuple[Fp8Weight, Loss]:
    """FP8 weights of one expert's released FP4 matrix [N, K / 2], N and K multiples of 128."""
    values = dequantize_fp4(packed, scale)
    blocked = _block(values)
    return blocked, _loss(values, blocked)


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
