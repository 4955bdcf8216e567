"""Rows that were cast and packed, perhaps on another rank: placed for products, however often, and unpacked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.casts import GROUP, new_cast
from deepinfer.kernels.nvidia.number_formats import decode_e8m0
from deepinfer.kernels.reference.quantize import decode_e8m0 as decode_scales

_ROWS = 16
_GROUPS = 8
_WORDS = tl.constexpr(GROUP // 4)  # of four codes, in a group


@triton.jit
def _place_rows_kernel(
    words_ptr,
    packed_ptr,
    source_ptr,
    codes_ptr,
    scale_ptr,
    num_places,
    stride,
    PACKED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """ROWS places, GROUPS groups of their codes and scales."""
    NUM_WORDS: tl.constexpr = NUM_GROUPS * _WORDS
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    source = tl.load(source_ptr + places, mask=places < num_places, other=-1).to(tl.int64)
    taken = source >= 0
    words = tl.program_id(1) * (GROUPS * _WORDS) + tl.arange(0, GROUPS * _WORDS)
    inside = taken[:, None] & (words < NUM_WORDS)[None, :]
    codes = tl.load(words_ptr + source[:, None] * (PACKED // 4) + words[None, :], mask=inside, other=0)
    tl.store(codes_ptr + places[:, None] * NUM_WORDS + words[None, :], codes, mask=inside)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = taken[:, None] & (groups < NUM_GROUPS)[None, :]
    power = tl.load(packed_ptr + source[:, None] * PACKED + NUM_WORDS * 4 + groups[None, :], mask=inside, other=0)
    tl.store(scale_ptr + groups[None, :] * stride + places[:, None], decode_e8m0(power.to(tl.int32)), mask=inside)


def place_rows(packed: Tensor, source: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """Codes [P, `width`] and scales [P, `width` / 128], as `cast_fp8` returns them, of the rows `source` int32 [P] of
    `packed` (see `ops.CastRows`); unwritten where that is -1.
    """
    codes, scales = new_cast(len(source), width, packed.device)
    num_groups = width // GROUP
    _place_rows_kernel[(triton.cdiv(len(source), _ROWS), triton.cdiv(num_groups, _GROUPS))](
        packed.view(torch.int32),
        packed,
        source,
        codes.view(torch.int32),
        scales,
        len(source),
        scales.stride(1),
        PACKED=packed.shape[1],
        NUM_GROUPS=num_groups,
        ROWS=_ROWS,
        GROUPS=_GROUPS,
    )
    return codes, scales


def unpack_rows(packed: Tensor, *, width: int) -> Tensor:
    """bf16 [R, `width`]: the values of `packed` rows, exact."""
    codes = packed[:, :width].view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
    scales = decode_scales(packed[:, width : width + width // GROUP])
    return (codes * scales.unsqueeze(2)).flatten(1).bfloat16()
