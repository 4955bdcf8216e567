"""Linear maps: float32 sums, one rounding. Quantised weights are dequantised once at load, which is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepinfer.kernels.ops import CastRows, Numerics
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.matmul import matmul_rows
from deepinfer.kernels.reference.norm import RMSNorm
from deepinfer.kernels.reference.quantize import dequantize_fp8_tiles, round_fp8
from deepinfer.kernels.reference.swiglu import SwiGLU


def activation_values(x: Tensor, numerics: Numerics) -> Tensor:
    """float32 values that a quantised linear multiplies: x after the FP8 cast, or x itself."""
    return round_fp8(x) if numerics.quantise_activations else x.float()


@dataclass(slots=True, frozen=True)
class Linear:
    """`ops.Linear`; the prepared weight is float32 [N, K]."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.float()

    def __call__(self, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        return matmul_rows(x.float(), weight).to(out_dtype)


@dataclass(slots=True, frozen=True)
class RoughLinear:
    """`ops.RoughLinear`, as exact as `Linear`."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.float()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul_rows(x.float(), weight)


@dataclass(slots=True, frozen=True)
class QuantizedLinear:
    """`ops.QuantizedLinear`; the prepared weight is float32 [N, K]."""

    reads_casts: ClassVar[bool] = False
    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor) -> Tensor:
        return dequantize_fp8_tiles(weight, scale)

    def __call__(self, x: Tensor, weight: Tensor, *, cast: CastRows | None = None) -> Tensor:  # noqa: ARG002
        return matmul_rows(activation_values(x, self.numerics), weight).to(self.numerics.dtype)

    def after_norm(self, x: Tensor, norm: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        return self(RMSNorm(self.numerics)(x, norm, epsilon=epsilon), weight)

    def after_swiglu(self, both: Tensor, weight: Tensor, *, limit: float) -> Tensor:
        gate, up = both.chunk(2, 1)
        return self(SwiGLU(self.numerics)(gate, up, limit=limit), weight)


@dataclass(slots=True, frozen=True)
class GroupedLinear:
    """`ops.GroupedLinear`; the prepared weight is float32 [G, N, K]."""

    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor, *, num_groups: int) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).unflatten(0, (num_groups, -1))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        values = x.float()
        parts = [matmul_rows(values[:, group], weight[group]) for group in range(weight.shape[0])]
        return torch.cat(parts, dim=1).to(self.numerics.dtype)


IMPLEMENTATIONS = (
    implementation("linear", lambda _: Linear()),
    implementation("rough_linear", lambda _: RoughLinear()),
    implementation("quantized_linear", QuantizedLinear),
    implementation("grouped_linear", GroupedLinear),
)
