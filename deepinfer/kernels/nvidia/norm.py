"""RMS norm and rotary embedding in Triton: float32 inside, one rounding at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.ops import Numerics


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, stride, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    tl.store(out_ptr + row * WIDTH + columns, weight * (x * inverse), mask=inside)


@triton.jit
def _rotate_kernel(
    x_ptr,
    cosine_ptr,
    sine_ptr,
    num_vectors,
    sign,
    VECTORS_PER_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program turns the last 2 * PAIRS channels of BLOCK vectors in place."""
    vectors = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (vectors < num_vectors)[:, None]
    channels = tl.arange(0, 2 * PAIRS)[None, :]
    pairs = tl.arange(0, PAIRS)[None, :]
    place = x_ptr + vectors[:, None] * WIDTH + (WIDTH - 2 * PAIRS) + channels
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (BLOCK, PAIRS, 2)))
    angle = (vectors // VECTORS_PER_ROW)[:, None] * PAIRS + pairs
    cosine = tl.load(cosine_ptr + angle, mask=inside, other=0.0)
    sine = tl.load(sine_ptr + angle, mask=inside, other=0.0) * sign
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    tl.store(place, tl.reshape(turned, (BLOCK, 2 * PAIRS)), mask=inside)


@dataclass(slots=True, frozen=True)
class RMSNorm:
    """`ops.RMSNorm`; rows may lie apart."""

    numerics: Numerics

    def __call__(self, x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        width = x.shape[-1]
        out = torch.empty(x.shape, dtype=self.numerics.dtype, device=x.device)
        num_rows = x.numel() // width
        if num_rows:
            block = triton.next_power_of_2(width)
            num_warps = 8 if block >= 4096 else 4
            if x.dim() != 2 or x.stride(1) != 1:
                x = x.contiguous().view(num_rows, width)
            _rms_norm_kernel[(num_rows,)](
                x, weight, out, x.stride(0), epsilon, WIDTH=width, BLOCK=block, num_warps=num_warps
            )
        return out


@dataclass(slots=True, frozen=True)
class Rotate:
    """`ops.Rotate`, in place where x is contiguous and already in the model dtype."""

    numerics: Numerics

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool = False) -> Tensor:
        out = x.to(self.numerics.dtype).contiguous()
        width, pairs = x.shape[-1], cosine.shape[1]
        num_vectors = x.numel() // width
        if num_vectors:
            block = 32
            _rotate_kernel[(triton.cdiv(num_vectors, block),)](
                out,
                cosine.contiguous(),
                sine.contiguous(),
                num_vectors,
                -1.0 if inverse else 1.0,
                VECTORS_PER_ROW=num_vectors // x.shape[0],
                WIDTH=width,
                PAIRS=pairs,
                BLOCK=block,
            )
        return out


IMPLEMENTATIONS = (triton_kernel("rms_norm", RMSNorm), triton_kernel("rotate", Rotate))
