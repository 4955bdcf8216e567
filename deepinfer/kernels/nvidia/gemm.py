"""Linear maps in Triton: the portable, batch-invariant choice. Fixed tiles, sums along K in one order.

Quantised weights are dequantised once at load, which is exact in bf16: E4M3 times a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.casts import fp8_values
from deepinfer.kernels.nvidia.moe import SwiGLU
from deepinfer.kernels.nvidia.norm import RMSNorm
from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.quantize import dequantize_fp8_tiles


@triton.jit
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Group program_id(2): x[:, group * K :][:, :K] times weight[group] transposed -> out[:, group * N :][:, :N]."""
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptr += group * K
    weight_ptr += group * N * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        x_mask = (rows < num_rows)[:, None] & (depth < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + depth[None, :], mask=x_mask, other=0.0)
        weight_mask = (columns < N)[None, :] & (depth < K)[:, None]
        place = columns[None, :].to(tl.int64) * K + depth[:, None]
        weight = tl.load(weight_ptr + place, mask=weight_mask, other=0.0)
        total = tl.dot(x.to(weight.dtype), weight, total, input_precision="ieee")
    mask = (rows < num_rows)[:, None] & (columns < N)[None, :]
    tl.store(out_ptr + group * N + rows[:, None] * out_stride + columns[None, :], total, mask=mask)


def matmul(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x [T, G, K] times weight [G, N, K] transposed, group by group -> [T, G * N]; x is cast to the weight's dtype."""
    num_rows = x.shape[0]
    num_groups, n, k = weight.shape
    out = torch.empty(num_rows, num_groups * n, dtype=out_dtype, device=x.device)
    if num_rows:
        x = x.contiguous()
        _matmul_kernel[(triton.cdiv(n, 128), triton.cdiv(num_rows, 64), num_groups)](
            x, weight, out, num_rows, x.stride(0), out.stride(0), N=n, K=k, ROWS=64, COLUMNS=128, DEPTH=32
        )
    return out


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

    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).to(self.numerics.dtype).unsqueeze(0)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
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
