"""Linear maps in Triton: the portable, batch-invariant choice. Tiles by weight alone, sums along K in one order.

Quantised weights are dequantised once at load, which is exact in bf16: E4M3 times a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.casts import fp8_values
from deepinfer.kernels.nvidia.fences import fence_copies
from deepinfer.kernels.nvidia.moe import SwiGLU
from deepinfer.kernels.nvidia.norm import RMSNorm
from deepinfer.kernels.ops import CastRows, Numerics
from deepinfer.kernels.reference.quantize import dequantize_fp8_tiles


@dataclass(slots=True, frozen=True)
class _Tiles:
    """How a product is cut: a program's rows, columns and the depth of one of its turns; `parts` of K are summed last.

    They depend on the weight alone, never on the number of rows, so that a row's sums have one order.
    """

    rows: int
    columns: int
    depth: int
    parts: int
    num_warps: int
    num_stages: int


_FLOAT32 = _Tiles(64, 128, 32, 1, 4, 3)
# without matrix units every column of a tile costs, there or not
_FLOAT32_FEW = _Tiles(16, 16, 64, 4, 4, 3)
_NARROW = _Tiles(64, 128, 64, 4, 4, 4)  # tiles of all of K would keep too few processors busy
_FEW_ROWS = _Tiles(64, 64, 64, 5, 4, 5)  # the same for up to some hundreds of rows
_MEDIUM = _Tiles(64, 128, 64, 1, 4, 4)
_WIDE = _Tiles(128, 256, 64, 1, 8, 3)
_NARROW_COLUMNS, _MEDIUM_COLUMNS = 512, 2048  # at the most


def _tiles(num_columns: int, depth: int, dtype: torch.dtype) -> _Tiles:
    """Return what was fastest on an H200 with 64 to 4,096 rows, or not much slower."""
    if dtype == torch.float32:
        is_few = num_columns <= _FLOAT32_FEW.columns and depth % (_FLOAT32_FEW.parts * _FLOAT32_FEW.depth) == 0
        return _FLOAT32_FEW if is_few else _FLOAT32
    if num_columns <= _NARROW_COLUMNS and depth % (_NARROW.parts * _NARROW.depth) == 0:
        return _NARROW
    return _MEDIUM if num_columns <= _MEDIUM_COLUMNS else _WIDE


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    out_stride,
    part_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Group program_id(1): x[:, group * K :][:, :K] times weight[group] transposed -> out[:, group * N :][:, :N].

    Of K, part program_id(2); each part has an output of its own. `NEIGHBOURS` tiles of rows share a tile of columns in
    a row, so that the weight is read from the L2 cache.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(N, COLUMNS)
    number = tl.program_id(0)
    band = number // (NEIGHBOURS * column_tiles) * NEIGHBOURS
    within = number % (NEIGHBOURS * column_tiles)
    height = min(row_tiles - band, NEIGHBOURS)
    rows = (band + within % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    group, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    x_ptr += group * K
    weight_ptr += group * N * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    end = (part + 1) * (K // PARTS)
    for start in range(part * (K // PARTS), end, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        x_mask, weight_mask = (rows < num_rows)[:, None], (columns < N)[None, :]
        if K // PARTS % DEPTH:
            x_mask, weight_mask = x_mask & (depth < end)[None, :], weight_mask & (depth < end)[:, None]
        x = tl.load(x_ptr + rows[:, None] * x_stride + depth[None, :], mask=x_mask, other=0.0)
        place = columns[None, :].to(tl.int64) * K + depth[:, None]
        weight = tl.load(weight_ptr + place, mask=weight_mask, other=0.0)
        fence_copies(PLAIN)
        total = tl.dot(x.to(weight.dtype), weight, total, input_precision="ieee")
    mask = (rows < num_rows)[:, None] & (columns < N)[None, :]
    out_ptr += part * part_stride + group * N
    tl.store(out_ptr + rows[:, None] * out_stride + columns[None, :], total, mask=mask)


@triton.jit
def _sum_parts_kernel(parts_ptr, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum along the first dimension, in its order."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * count + places, mask=places < count, other=0.0)
    tl.store(out_ptr + places, total, mask=places < count)


def matmul(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x [T, G, K] times weight [G, N, K] transposed, group by group -> [T, G * N]; x is cast to the weight's dtype."""
    num_groups, n, k = weight.shape
    tiles = _tiles(num_groups * n, k, weight.dtype)
    if tiles.parts == 1:
        return _multiply(x, weight, tiles, out_dtype)[0]
    parts = _multiply(x, weight, tiles, torch.float32)
    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=x.device)
    if len(x):
        _sum_parts_kernel[(triton.cdiv(out.numel(), 1024),)](parts, out, out.numel(), PARTS=tiles.parts, BLOCK=1024)
    return out


def matmul_parts(x: Tensor, weight: Tensor, *, few_rows: bool = False) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> float32 [P, T, N], P parts of the sum that the caller adds in order.

    N is small. P depends on the weight and on `few_rows`: some hundreds at the most.
    """
    n, k = weight.shape
    tiles = _tiles(n, k, weight.dtype)
    if few_rows and weight.dtype == torch.bfloat16 and k % (_FEW_ROWS.parts * _FEW_ROWS.depth) == 0:
        tiles = _FEW_ROWS
    return _multiply(x.unsqueeze(1), weight.unsqueeze(0), tiles, torch.float32)


def _multiply(x: Tensor, weight: Tensor, tiles: _Tiles, out_dtype: torch.dtype) -> Tensor:
    """Return the parts [P, T, G * N] of a product as `matmul` takes it."""
    num_rows = x.shape[0]
    num_groups, n, k = weight.shape
    parts = torch.empty(tiles.parts, num_rows, num_groups * n, dtype=out_dtype, device=x.device)
    if not num_rows:
        return parts
    x = x.contiguous()
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(n, tiles.columns)
    _matmul_kernel[(num_tiles, num_groups, tiles.parts)](
        x,
        weight,
        parts,
        num_rows,
        x.stride(0),
        parts.stride(1),
        parts.stride(0),
        N=n,
        K=k,
        PARTS=tiles.parts,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        NEIGHBOURS=8,
        PLAIN=not x.is_cuda,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return parts


@dataclass(slots=True, frozen=True)
class Linear:
    """`ops.Linear`; the prepared weight is [1, N, K] as loaded."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def __call__(self, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        if x.dtype == torch.float32:
            weight = weight.float()
        return matmul(x.unsqueeze(1), weight, out_dtype)


@dataclass(slots=True, frozen=True)
class RoughLinear:
    """`ops.RoughLinear`, as exact as `Linear`."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul(x.unsqueeze(1), weight, torch.float32)


@dataclass(slots=True, frozen=True)
class QuantizedLinear:
    """`ops.QuantizedLinear`, its 1 x 32 activation scales included; the prepared weight is in the model dtype."""

    reads_casts: ClassVar[bool] = False
    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).to(self.numerics.dtype).unsqueeze(0)

    def __call__(self, x: Tensor, weight: Tensor, *, cast: CastRows | None = None) -> Tensor:  # noqa: ARG002
        values = fp8_values(x) if self.numerics.quantise_activations else x
        return matmul(values.unsqueeze(1), weight, self.numerics.dtype)

    def after_norm(self, x: Tensor, norm: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        return self(RMSNorm(self.numerics)(x, norm, epsilon=epsilon), weight)

    def after_swiglu(self, both: Tensor, weight: Tensor, *, limit: float) -> Tensor:
        gate, up = both.chunk(2, 1)
        return self(SwiGLU(self.numerics)(gate, up, limit=limit), weight)


@dataclass(slots=True, frozen=True)
class GroupedLinear:
    """`ops.GroupedLinear`; the prepared weight is [G, N, K] in the model dtype."""

    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor, *, num_groups: int) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).to(self.numerics.dtype).unflatten(0, (num_groups, -1))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul(x, weight, self.numerics.dtype)


IMPLEMENTATIONS = (
    triton_kernel("linear", lambda _: Linear()),
    triton_kernel("rough_linear", lambda _: RoughLinear()),
    triton_kernel("quantized_linear", QuantizedLinear),
    triton_kernel("grouped_linear", GroupedLinear),
)
