"""Linear maps through torch's cuBLAS: bf16 operands, float32 sums. Fast, but a row's bits depend on the row count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, VERIFIED
from deepinfer.kernels.nvidia.casts import fp8_values
from deepinfer.kernels.nvidia.gemm import matmul_parts
from deepinfer.kernels.nvidia.moe import SwiGLU
from deepinfer.kernels.nvidia.norm import RMSNorm
from deepinfer.kernels.nvidia.routing import choose_experts
from deepinfer.kernels.ops import CastRows, Numerics
from deepinfer.kernels.reference.quantize import dequantize_fp8_tiles
from deepinfer.kernels.registry import Implementation

_MAX_PART_ROWS = 512  # up to so many rows, parts in Triton are faster than cuBLAS on an H200


@dataclass(slots=True, frozen=True)
class Linear:
    """`ops.Linear`. Products of bf16 numbers are exact in float32, so nothing is lost against float32 operands."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def __call__(self, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        if torch.float32 in (x.dtype, weight.dtype):
            return torch.mm(x.float(), weight.float().t()).to(out_dtype)
        return torch.mm(x, weight.t(), out_dtype=out_dtype)


@dataclass(slots=True, frozen=True)
class RoughLinear:
    """`ops.RoughLinear`, as exact as `Linear`."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)


@dataclass(slots=True, frozen=True)
class QuantizedLinear:
    """`ops.QuantizedLinear`, its 1 x 32 activation scales included; the prepared weight is bf16 [N, K], exact."""

    reads_casts: ClassVar[bool] = False
    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).to(torch.bfloat16)

    def __call__(self, x: Tensor, weight: Tensor, *, cast: CastRows | None = None) -> Tensor:  # noqa: ARG002
        values = fp8_values(x) if self.numerics.quantise_activations else x
        return torch.mm(values, weight.t())

    def after_norm(self, x: Tensor, norm: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        return self(RMSNorm(self.numerics)(x, norm, epsilon=epsilon), weight)

    def after_swiglu(self, both: Tensor, weight: Tensor, *, limit: float) -> Tensor:
        gate, up = both.chunk(2, 1)
        return self(SwiGLU(self.numerics)(gate, up, limit=limit), weight)


@dataclass(slots=True, frozen=True)
class GroupedLinear:
    """`ops.GroupedLinear`; the prepared weight is bf16 [G, N, K], exact."""

    def prepare(self, weight: Tensor, scale: Tensor, *, num_groups: int) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).to(torch.bfloat16).unflatten(0, (num_groups, -1))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)


@dataclass(slots=True, frozen=True)
class RouteTokens:
    """`ops.RouteTokens`; few rows go through Triton, whose parts need no kernel that adds them."""

    def prepare(self, router: Tensor) -> Tensor:
        return router

    def __call__(
        self, hidden: Tensor, router: Tensor, bias: Tensor, is_padding: Tensor, *, num_chosen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        if len(hidden) <= _MAX_PART_ROWS:
            parts = matmul_parts(hidden, router, few_rows=True)
        else:
            parts = torch.mm(hidden, router.t(), out_dtype=torch.float32).unsqueeze(0)
        return choose_experts(parts, bias, is_padding, num_chosen=num_chosen, scale=scale)


def _entry(op: str, build: Callable[[Numerics], Any]) -> Implementation:
    return Implementation(
        op=op,
        build=build,
        device_types=("cuda",),
        dtypes=BF16,
        batch_invariant=False,
        package="torch",
        verified_chips=VERIFIED,
    )


IMPLEMENTATIONS = (
    _entry("linear", lambda _: Linear()),
    _entry("rough_linear", lambda _: RoughLinear()),
    _entry("quantized_linear", QuantizedLinear),
    _entry("grouped_linear", lambda _: GroupedLinear()),
    _entry("route_tokens", lambda _: RouteTokens()),
)
