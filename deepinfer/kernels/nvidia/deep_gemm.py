"""FP8 products of DeepGEMM (package sgl-deep-gemm) on Hopper: activations 1 x 128, weights 128 x 128.

All scales are powers of two, which makes the coarser groups almost free of loss (`fp8_weights`); sums are float32 as in
the reference. Not bitwise the reference: a value that becomes subnormal under the larger group scale can round
differently, 0.03 % of activations at most on random data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import deep_gemm
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, VERIFIED
from deepinfer.kernels.nvidia.casts import GROUP, cast_fp8, codes_and_scales, new_cast, store_cast
from deepinfer.kernels.nvidia.fp8_experts import ExpertMLP
from deepinfer.kernels.nvidia.fp8_weights import Fp8Weight, reblock_fp8, round_to_fp8
from deepinfer.kernels.nvidia.gemm import QuantizedLinear as TritonLinear
from deepinfer.kernels.nvidia.gemm import RoughLinear as TritonRoughLinear
from deepinfer.kernels.nvidia.moe import SwiGLU, swiglu_halves
from deepinfer.kernels.nvidia.norm import RMSNorm
from deepinfer.kernels.ops import CastRows, Numerics
from deepinfer.kernels.reference.quantize import dequantize_fp8_tiles
from deepinfer.kernels.registry import Implementation
from deepinfer.log import get_logger

PACKAGE = "sgl-deep-gemm"
_MAX_RELATIVE_NORM = 1e-4
_CAST_ROWS = 4

_log = get_logger("kernels")


def probe() -> None:
    """Run one small product; raises what the package raises."""
    x = torch.ones(1, GROUP, dtype=torch.bfloat16, device="cuda")
    weight = Fp8Weight(torch.ones(GROUP, GROUP, device="cuda").to(torch.float8_e4m3fn), torch.ones(1, 1, device="cuda"))
    result = _product(cast_fp8(x), weight)
    if not bool((result == GROUP).all()):
        raise RuntimeError(f"a product of ones gave {float(result[0, 0])} instead of {GROUP}")


def _product(x: tuple[Tensor, Tensor], weight: Fp8Weight) -> Tensor:
    codes, scales = x
    out = torch.empty(codes.shape[0], weight.codes.shape[0], dtype=torch.bfloat16, device=codes.device)
    if len(codes):
        deep_gemm.fp8_gemm_nt((codes, scales), (weight.codes, weight.scale), out)
    return out


@dataclass(slots=True, frozen=True)
class RoughLinear:
    """`ops.RoughLinear` in FP8, rounded to bf16. Matrices that don't divide by 128 stay as they are."""

    def prepare(self, weight: Tensor) -> Fp8Weight | Tensor:
        if weight.shape[1] % GROUP or weight.shape[0] % 64:
            return TritonRoughLinear().prepare(weight)
        return round_to_fp8(weight)

    def __call__(self, x: Tensor, weight: Fp8Weight | Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return TritonRoughLinear()(x, weight)
        return _product(cast_fp8(x), weight)


@dataclass(slots=True, frozen=True)
class QuantizedLinear:
    """`ops.QuantizedLinear` with 1 x 128 activation groups.

    Matrices that lose more than 1e-4 of their norm by re-blocking, or that don't divide by 128, go to Triton in bf16.
    """

    reads_casts: ClassVar[bool] = True
    numerics: Numerics

    def prepare(self, weight: Tensor, scale: Tensor) -> Fp8Weight | Tensor:
        if weight.shape[1] % GROUP == 0 and weight.shape[0] % 64 == 0:
            blocked, loss = reblock_fp8(weight, scale)
            shape = f"{weight.shape[0]} x {weight.shape[1]}"
            _log.debug("FP8 matrix %s: re-blocking changed %.4f%%", shape, 100 * loss.changed_share)
            if loss.relative_norm <= _MAX_RELATIVE_NORM:
                return blocked
            _log.warning(
                "FP8 matrix %s stays bf16: re-blocking changes %.2f%% of its values, by %.1e of its norm",
                shape,
                100 * loss.changed_share,
                loss.relative_norm,
            )
        return TritonLinear(self.numerics).prepare(weight, scale)

    def __call__(self, x: Tensor, weight: Fp8Weight | Tensor, *, cast: CastRows | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return TritonLinear(self.numerics)(x, weight)
        return _product(cast_fp8(x) if cast is None else codes_and_scales(cast), weight)

    def after_norm(self, x: Tensor, norm: Tensor, weight: Fp8Weight | Tensor, *, epsilon: float) -> Tensor:
        if isinstance(weight, Tensor) or not len(x) or x.stride(1) != 1:
            return self(RMSNorm(self.numerics)(x, norm, epsilon=epsilon), weight)
        return _product(_norm_cast(x, norm, epsilon), weight)

    def after_swiglu(self, both: Tensor, weight: Fp8Weight | Tensor, *, limit: float) -> Tensor:
        if isinstance(weight, Tensor) or not len(both):
            gate, up = both.chunk(2, 1)
            return self(SwiGLU(self.numerics)(gate, up, limit=limit), weight)
        return _product(_swiglu_cast(both, limit), weight)


@dataclass(slots=True, frozen=True)
class GroupedLinear:
    """`ops.GroupedLinear`: bf16 operands, float32 sums; the prepared weight is bf16 [G, N, K], exact."""

    def prepare(self, weight: Tensor, scale: Tensor, *, num_groups: int) -> Tensor:
        return dequantize_fp8_tiles(weight, scale).to(torch.bfloat16).unflatten(0, (num_groups, -1)).contiguous()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        num_groups, n, _ = weight.shape
        out = torch.empty(x.shape[0], num_groups, n, dtype=torch.bfloat16, device=x.device)
        if len(x):
            deep_gemm.einsum("bhr,hdr->bhd", x.contiguous(), weight, out)
        return out.flatten(1)


@triton.jit
def _norm_cast_kernel(
    x_ptr,
    norm_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    stride,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of one row, rounded to bf16, then cast."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    norm = tl.load(norm_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    rounded = (norm * (x * inverse[:, None])).to(tl.bfloat16).to(tl.float32)
    store_cast(rounded, codes_ptr, scale_ptr, rows, rows >= 0, 0, WIDTH, stride, 1, BLOCK)


@triton.jit
def _swiglu_cast_kernel(
    both_ptr,
    codes_ptr,
    scale_ptr,
    num_rows,
    stride,
    limit,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SwiGLU of gate and up side by side, rounded to bf16, then cast."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    values = swiglu_halves(both_ptr, rows, rows < num_rows, first + tl.arange(0, BLOCK), limit, WIDTH)
    rounded = values.to(tl.bfloat16).to(tl.float32)
    store_cast(rounded, codes_ptr, scale_ptr, rows, rows < num_rows, first, WIDTH, stride, ROWS, BLOCK)


def _norm_cast(x: Tensor, norm: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    codes, scales = new_cast(num_rows, width, x.device)
    _norm_cast_kernel[(num_rows,)](
        x,
        norm,
        codes.view(torch.uint8),
        scales,
        x.stride(0),
        scales.stride(1),
        epsilon,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )
    return codes, scales


def _swiglu_cast(both: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    num_rows, width = both.shape[0], both.shape[1] // 2
    codes, scales = new_cast(num_rows, width, both.device)
    _swiglu_cast_kernel[(triton.cdiv(num_rows, _CAST_ROWS), triton.cdiv(width, 512))](
        both,
        codes.view(torch.uint8),
        scales,
        num_rows,
        scales.stride(1),
        limit,
        WIDTH=width,
        ROWS=_CAST_ROWS,
        BLOCK=512,
    )
    return codes, scales


def _entry(op: str, build: Callable[[Numerics], Any], *, released_numerics_only: bool) -> Implementation:
    return Implementation(
        op=op,
        build=build,
        device_types=("cuda",),
        dtypes=BF16,
        batch_invariant=True,
        released_numerics_only=released_numerics_only,
        package=PACKAGE,
        verified_chips=VERIFIED,
        required_chips=("sm_90",),
    )


IMPLEMENTATIONS = (
    _entry("rough_linear", lambda _: RoughLinear(), released_numerics_only=False),
    _entry("quantized_linear", QuantizedLinear, released_numerics_only=True),
    _entry("grouped_linear", lambda _: GroupedLinear(), released_numerics_only=False),
    _entry("expert_mlp", ExpertMLP, released_numerics_only=True),
)
