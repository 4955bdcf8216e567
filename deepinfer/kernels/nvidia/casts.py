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

_ROWS = 4
_BLOCK = 512
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
):
    """Store x [ROWS, BLOCK] float32, columns `first` on, as codes [rows, WIDTH] and scales [WIDTH / 128, stride]."""
    columns = first + tl.arange(0, BLOCK)
    groups = first // 128 + tl.arange(0, BLOCK // 128)
    power = fp8_scale(group_maxima(x, ROWS, BLOCK // 128, 128))
    # dividing by a power of two is multiplying by its reciprocal: exact, as the scale is no less than 2^-22
    values = x * spread(decode_e8m0(254 - power), ROWS, BLOCK // 128, 128)
    if PLAIN:
        codes = encode_e4m3(values)
    else:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(codes_ptr + rows[:, None] * WIDTH + columns[None, :], codes, mask=wanted)
    wanted = inside[:, None] & (groups < WIDTH // 128)[None, :]
    tl.store(scale_ptr + groups[None, :] * stride + rows[:, None], decode_e8m0(power), mask=wanted)


@triton.jit
def _cast_kernel(
    x_ptr,
    source_ptr,
    codes_ptr,
    scale_ptr,
    num_rows,
    stride,
    GATHER: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    source = rows
    if GATHER:
        source = tl.load(source_ptr + rows, mask=inside, other=-1).to(tl.int64)
        inside = inside & (source >= 0)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(x_ptr + source[:, None] * WIDTH + columns[None, :], mask=wanted, other=0.0).to(tl.float32)
    store_cast(x, codes_ptr, scale_ptr, rows, inside, first, WIDTH, stride, ROWS, BLOCK, PLAIN)


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
    stride = triton.cdiv(num_rows, 4) * 4
    scales = torch.empty(width // GROUP, stride, dtype=torch.float32, device=device)
    return codes, scales.t()[:num_rows]


def cast_fp8(x: Tensor, source: Tensor | None = None, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and power-of-two scales of x [T, K], one scale per row and 128 columns; K a multiple of 128.

    With `source` int32 [num_rows]: row p holds row source[p] of x, and is left unwritten where that is -1.
    """
    width = x.shape[1]
    rows = x.shape[0] if num_rows is None else num_rows
    codes, scales = new_cast(rows, width, x.device)
    if rows:
        _cast_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _BLOCK))](
            x.contiguous(),
            codes if source is None else source,
            codes.view(torch.uint8),
            scales,
            rows,
            scales.stride(1),
            GATHER=source is not None,
            WIDTH=width,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            PLAIN=not x.is_cuda,
        )
    return codes, scales
