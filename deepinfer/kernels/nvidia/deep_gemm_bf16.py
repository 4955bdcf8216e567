"""Linear maps of bf16 through DeepGEMM: slower than cuBLAS, but a row's bits don't depend on the number of rows.

`bf16_gemm_nt` of sgl-deep-gemm 0.1.5 sums along K in the same order for any number of rows; a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deep_gemm
import torch
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, VERIFIED
from deepinfer.kernels.nvidia.gemm import matmul
from deepinfer.kernels.nvidia.routing import choose_experts
from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.registry import Implementation

_UNIT = 64  # of which K has to be a multiple


@dataclass(slots=True, frozen=True)
class Linear:
    """`ops.Linear`; operands of float32 and other lengths of sums go to Triton."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def __call__(self, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        if torch.float32 in (x.dtype, weight.dtype) or weight.shape[1] % _UNIT:
            return matmul(x.unsqueeze(1), weight.unsqueeze(0).to(x.dtype), out_dtype)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
        if len(x):
            deep_gemm.bf16_gemm_nt(x.contiguous(), weight, out)
        return out


@dataclass(slots=True, frozen=True)
class RouteTokens:
    """`ops.RouteTokens`."""

    def prepare(self, router: Tensor) -> Tensor:
        return router

    def __call__(
        self, hidden: Tensor, router: Tensor, bias: Tensor, is_padding: Tensor, *, num_chosen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        logits = Linear()(hidden, router, out_dtype=torch.float32)
        return choose_experts(logits.unsqueeze(0), bias, is_padding, num_chosen=num_chosen, scale=scale)


def _entry(op: str, build: Callable[[Numerics], Any]) -> Implementation:
    return Implementation(
        op=op,
        build=build,
        device_types=("cuda",),
        dtypes=BF16,
        batch_invariant=True,
        package="sgl-deep-gemm",
        verified_chips=VERIFIED,
        required_chips=("sm_90",),
    )


IMPLEMENTATIONS = (_entry("linear", lambda _: Linear()), _entry("route_tokens", lambda _: RouteTokens()))
