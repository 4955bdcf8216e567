"""FP8 casts of activations: as values (1 x 32 groups, the reference's), and as codes with scales (1 x 128)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.number_formats import (
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    fp8_scale,
    group_maxima,
    spread,
)
from deepinfer.kernels.ops import CastRows

_ROWS = 4
_BLOCK = 512
_LINE = 128  # bytes; a packed row is whole lines
GROUP = 128  # columns per scale of cast activations and of re-blocked weights; rows per scale of the latter


@triton.jit
def round_fp8(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x [ROWS, WIDTH] float32 after the FP8 cast of `ops.QuantizedLinear`."""
    power = fp8_scale(group_maxima(x, ROWS, WIDTH // 32, 32))
    # as in `store_cast`: multiplying by the reciprocal of a power of two is dividing by it
    values = x * spread(decode_e8m0(254 - power), ROWS, WIDTH // 32, 32)
    return decode_e4m3(encode_e4m3(values)) * spread(decode_e8m0(power), ROWS, WIDTH // 32, 32)


@triton.jit
def _values_kernel(x_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    place = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, round_fp8(x, ROWS, BLOCK), mask=inside)


@triton.jit
def store_cast(
    x,
    codes_ptr,
    scale_ptr,
    rows,
    inside,
    first,
    WIDTH,
    stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr = False,
    PACKED: tl.constexpr = 0,
):
    """Store x [ROWS, BLOCK] float32, columns `first` on, as codes [rows, WIDTH] and scales [WIDTH / 128, stride].

    PACKED: bytes of a row of `CastRows.packed`, of which the codes are the beginning; 0: codes alone.
    """
    columns = first + tl.arange(0, BLOCK)
    groups = first // 128 + tl.arange(0, BLOCK // 128)
    power = fp8_scale(group_maxima(x, ROWS, BLOCK // 128, 128))
    # dividing by a power of two is multiplying by its reciprocal: exact, as the scale is no less than 2^-22
    values = x * spread(decode_e8m0(254 - power), ROWS, BLOCK // 128, 128)
    if PLAIN:
        codes = encode_e4m3(values)
    else:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    code_rows = codes_ptr + rows[:, None] * (PACKED if PACKED > 0 else WIDTH)
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(code_rows + columns[None, :], codes, mask=wanted)
    wanted = inside[:, None] & (groups < WIDTH // 128)[None, :]
    if PACKED > 0:
        tl.store(code_rows + WIDTH + groups[None, :], power.to(tl.uint8), mask=wanted)
    tl.store(scale_ptr + groups[None, :] * stride + rows[:, None], decode_e8m0(power), mask=wanted)


@triton.jit
def _cast_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    num_rows,
    stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    PACKED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(x_ptr + rows[:, None] * WIDTH + columns[None, :], mask=wanted, other=0.0).to(tl.float32)
    store_cast(x, codes_ptr, scale_ptr, rows, inside, first, WIDTH, stride, ROWS, BLOCK, PLAIN, PACKED)


def fp8_values(x: Tensor) -> Tensor:
    """x [T, K] after the FP8 cast of `ops.QuantizedLinear`, in the dtype of x (exact in bf16)."""
    num_rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows:
        grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _BLOCK))
        _values_kernel[grid](x.contiguous(), out, num_rows, WIDTH=width, ROWS=_ROWS, BLOCK=_BLOCK)
    return out


def new_cast(num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty E4M3 codes [T, K] and float32 scales [T, K / 128] that lie column by column, 16 bytes aligned."""
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, _new_scales(num_rows, width, device)


def new_cast_rows(num_rows: int, width: int, device: torch.device) -> CastRows:
    """Empty rows of `width` columns, a multiple of 128."""
    num_bytes = triton.cdiv(width + width // GROUP, _LINE) * _LINE
    packed = torch.empty(num_rows, num_bytes, dtype=torch.uint8, device=device)
    return CastRows(packed, _new_scales(num_rows, width, device))


def codes_and_scales(cast: CastRows) -> tuple[Tensor, Tensor]:
    """E4M3 codes [T, K], rows of which lie apart, and their scales, as `cast_fp8` returns them."""
    width = cast.scales.shape[1] * GROUP
    return cast.packed[:, :width].view(torch.float8_e4m3fn), cast.scales


def cast_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and power-of-two scales of x [T, K], one scale per row and 128 columns; K a multiple of 128."""
    codes, scales = new_cast(x.shape[0], x.shape[1], x.device)
    _cast(x, codes.view(torch.uint8), scales, packed_bytes=0)
    return codes, scales


def cast_rows(x: Tensor) -> CastRows:
    """The same as rows that can be sent."""
    cast = new_cast_rows(x.shape[0], x.shape[1], x.device)
    _cast(x, cast.packed, cast.scales, packed_bytes=cast.packed.shape[1])
    return cast


def _new_scales(num_rows: int, width: int, device: torch.device) -> Tensor:
    scales = torch.empty(width // GROUP, triton.cdiv(num_rows, 4) * 4, dtype=torch.float32, device=device)
    return scales.t()[:num_rows]


def _cast(x: Tensor, codes: Tensor, scales: Tensor, *, packed_bytes: int) -> None:
    num_rows, width = x.shape
    if num_rows:
        _cast_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _BLOCK))](
            x.contiguous(),
            codes,
            scales,
            num_rows,
            scales.stride(1),
            WIDTH=width,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            PLAIN=not x.is_cuda,
            PACKED=packed_bytes,
        )
