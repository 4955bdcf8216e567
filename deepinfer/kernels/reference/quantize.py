"""Casts between float32 and the released number formats: E4M3, E2M1, and their E8M0 or E4M3 scales.

Rules: the released reference implementation; e2m1 and e4m3 round to nearest, ties to the even code. All functions work
along the last axis and are exact in both directions, so packed codes and rounded values carry the same information.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # columns per scale of FP8 rows, FP4 index rows and FP4 weights
MAIN_BLOCK = 16  # columns per scale of FP4 main rows
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


def decode_e8m0(scale: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 0x00400000, bits)
    bits = torch.where(scale == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def round_up_to_power_of_two(values: Tensor) -> Tensor:
    """Return the smallest power of two >= each value (float32, normal, positive), from the IEEE bits."""
    return ((values.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (float8_e4m3fn [..., K]) and E8M0 bytes (uint8 [..., K/32]); scale >= 2^-22."""
    codes, scale = _scale_fp8(x)
    return codes.flatten(-2), _exponent_byte(scale.squeeze(-1))


def round_fp8(x: Tensor) -> Tensor:
    """Return the float32 values that `quantize_fp8` keeps."""
    codes, scale = _scale_fp8(x)
    return (codes.float() * scale).flatten(-2)


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_fp8`, float32; also the values of engram rows."""
    return (codes.float().unflatten(-1, (-1, BLOCK)) * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def _scale_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., K/32, 32] and float32 scales [..., K/32, 1].

    No clamp: amax / scale exceeds 448 by at most one rounding of 1/448, and E4M3 rounds all up to 464 to 448.
    """
    groups = x.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = round_up_to_power_of_two(largest * (1.0 / _E4M3_MAX))
    return (groups / scale).to(torch.float8_e4m3fn), scale


def _exponent_byte(power: Tensor) -> Tensor:
    """E8M0 byte of a normal power of two."""
    return (power.view(torch.int32) >> 23).to(torch.uint8)


def quantize_fp4_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed e2m1 codes (uint8 [..., K/2]) and E8M0 bytes (uint8 [..., K/32])."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1).clamp_min(_E2M1_MAX * 2.0**-126)
    scale = round_up_to_power_of_two(largest * (1.0 / _E2M1_MAX))
    codes = _encode_e2m1(groups / scale.unsqueeze(-1))
    return _pack_nibbles(codes.flatten(-2)), _exponent_byte(scale)


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 values of packed e2m1 codes with one E8M0 byte per 32 columns: index rows and FP4 weights."""
    values = _decode_e2m1(_unpack_nibbles(packed)).unflatten(-1, (-1, BLOCK))
    return (values * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def quantize_fp4_main(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed e2m1 codes (uint8 [..., K/2]) and E4M3 scales as bytes (uint8 [..., K/16]).

    Scale = e4m3(max(amax, 6 * 2^-9) / 6), a true division, saturating at 448.
    """
    groups = x.float().unflatten(-1, (-1, MAIN_BLOCK))
    largest = groups.abs().amax(-1).clamp_min(_E2M1_MAX * 2.0**-9)
    scale = (largest / _E2M1_MAX).clamp_max(_E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _encode_e2m1(groups / scale.float().unsqueeze(-1))
    return _pack_nibbles(codes.flatten(-2)), scale.view(torch.uint8)


def dequantize_fp4_main(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_fp4_main`, float32."""
    values = _decode_e2m1(_unpack_nibbles(packed)).unflatten(-1, (-1, MAIN_BLOCK))
    return (values * scale.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)


def dequantize_fp8_tiles(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, K] of an FP8 matrix with one E8M0 byte per 32 x 32 tile; N and K need not be multiples of 32."""
    rows, columns = weight.shape
    factors = decode_e8m0(scale).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * factors


def _encode_e2m1(x: Tensor) -> Tensor:
    """4-bit codes in uint8, saturating at 6; the sign of zero is kept. Ties go to the even code."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, closed in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= bound if closed else size > bound
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def _decode_e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat((table, -table))[codes.int()]


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Even columns go to the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
