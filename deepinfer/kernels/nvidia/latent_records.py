"""Window records of latents in one kernel: RMS norm, rotary embedding, rounding of the released format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.cache import quantise_rows
from deepinfer.kernels.nvidia.norm import RMSNorm, Rotate
from deepinfer.kernels.nvidia.number_formats import decode_e4m3, decode_e8m0, spread
from deepinfer.kernels.ops import Numerics, RecordFormat

_ROWS = 4


@triton.jit
def _latent_kernel(
    x_ptr,
    weight_ptr,
    cosine_ptr,
    sine_ptr,
    out_ptr,
    num_rows,
    stride,
    epsilon,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows; rounds to bf16 behind the norm, behind the rotation, and as window records do."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (rows < num_rows)[:, None]
    x = tl.load(x_ptr + rows[:, None] * stride + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    normed = tl.load(weight_ptr + columns).to(tl.float32) * (x * inverse[:, None])
    even, odd = tl.split(tl.reshape(normed.to(tl.bfloat16).to(tl.float32), (ROWS, WIDTH // 2, 2)))
    pairs = tl.arange(0, WIDTH // 2)[None, :] - (WIDTH // 2 - PAIRS)
    angles = rows[:, None] * PAIRS + pairs
    cosine = tl.load(cosine_ptr + angles, mask=inside & (pairs >= 0), other=1.0)
    sine = tl.load(sine_ptr + angles, mask=inside & (pairs >= 0), other=0.0)
    turned = tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), (ROWS, WIDTH))
    codes, scale = quantise_rows(turned.to(tl.bfloat16).to(tl.float32), 0, ROWS, WIDTH)
    values = decode_e4m3(codes.to(tl.uint8)) * spread(decode_e8m0(scale), ROWS, WIDTH // 32, 32)
    tl.store(out_ptr + rows[:, None] * WIDTH + columns, values, mask=inside)


@dataclass(slots=True, frozen=True)
class LatentRecords:
    """`ops.LatentRecords`; one kernel for records that hold rounded values, three for others."""

    numerics: Numerics

    def __call__(
        self,
        latent: Tensor,
        weight: Tensor,
        cosine: Tensor,
        sine: Tensor,
        *,
        epsilon: float,
        record: RecordFormat,
        out: Tensor | None = None,
    ) -> Tensor:
        num_rows, width = latent.shape
        if not record.name.startswith("window:rounded") or latent.stride(1) != 1 or not num_rows:
            normed = RMSNorm(self.numerics)(latent, weight, epsilon=epsilon)
            return record.pack(Rotate(self.numerics)(normed, cosine, sine), out=out)
        if out is None:
            out = torch.empty(num_rows, record.num_bytes, dtype=torch.uint8, device=latent.device)
        _latent_kernel[(triton.cdiv(num_rows, _ROWS),)](
            latent,
            weight,
            cosine.contiguous(),
            sine.contiguous(),
            out.view(torch.bfloat16),
            num_rows,
            latent.stride(0),
            epsilon,
            WIDTH=width,
            PAIRS=cosine.shape[1],
            ROWS=_ROWS,
        )
        return out


IMPLEMENTATIONS = (triton_kernel("latent_records", LatentRecords),)
