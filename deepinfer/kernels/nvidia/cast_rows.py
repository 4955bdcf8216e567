"""Copies of cast rows: each row is cast once, however many experts it goes to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.casts import GROUP, new_cast

_ROWS = 16
_GROUPS = 8
_WORDS = tl.constexpr(GROUP // 4)  # of four codes, in a group


@triton.jit
def _copy_kernel(
    codes_ptr,
    scale_ptr,
    source_ptr,
    codes_out,
    scale_out,
    num_places,
    stride,
    out_stride,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """ROWS places, GROUPS groups of their codes and scales."""
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    source = tl.load(source_ptr + places, mask=places < num_places, other=-1).to(tl.int64)
    taken = source >= 0
    words = tl.program_id(1) * (GROUPS * _WORDS) + tl.arange(0, GROUPS * _WORDS)
    inside = taken[:, None] & (words < NUM_GROUPS * _WORDS)[None, :]
    codes = tl.load(codes_ptr + source[:, None] * (NUM_GROUPS * _WORDS) + words[None, :], mask=inside, other=0)
    tl.store(codes_out + places[:, None] * (NUM_GROUPS * _WORDS) + words[None, :], codes, mask=inside)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = (groups < NUM_GROUPS)[:, None] & taken[None, :]
    scale = tl.load(scale_ptr + groups[:, None] * stride + source[None, :], mask=inside, other=0.0)
    tl.store(scale_out + groups[:, None] * out_stride + places[None, :], scale, mask=inside)


def copy_cast(cast: tuple[Tensor, Tensor], source: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """Codes and scales [P] of the rows `source` int32 [P] of what `cast_fp8` returned; unwritten where that is -1."""
    codes, scales = cast
    width = codes.shape[1]
    codes_out, scales_out = new_cast(num_places, width, codes.device)
    num_groups = width // GROUP
    _copy_kernel[(triton.cdiv(num_places, _ROWS), triton.cdiv(num_groups, _GROUPS))](
        codes.view(torch.int32),
        scales,
        source,
        codes_out.view(torch.int32),
        scales_out,
        num_places,
        scales.stride(1),
        scales_out.stride(1),
        NUM_GROUPS=num_groups,
        ROWS=_ROWS,
        GROUPS=_GROUPS,
    )
    return codes_out, scales_out
