"""From one sublayer to the next in one Triton kernel: experts' sum, update of four streams, collapse, norm, cast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.casts import GROUP, new_cast_rows, store_cast
from deepinfer.kernels.ops import Activations, ExpertSum, Numerics

_BLOCK = 2048
_NUM_WARPS = 8


@triton.jit
def _four(place):
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def _load(streams_ptr, y_ptr, row, columns, WIDTH: tl.constexpr):
    """Columns of the four streams and of `y`."""
    inside = columns < WIDTH
    place = streams_ptr + row * (4 * WIDTH) + columns
    x0 = tl.load(place, mask=inside, other=0.0)
    x1 = tl.load(place + WIDTH, mask=inside, other=0.0)
    x2 = tl.load(place + 2 * WIDTH, mask=inside, other=0.0)
    x3 = tl.load(place + 3 * WIDTH, mask=inside, other=0.0)
    return x0, x1, x2, x3, tl.load(y_ptr + row * WIDTH + columns, mask=inside, other=0.0)


@triton.jit
def _advance_kernel(
    streams_ptr,
    y_ptr,
    values_ptr,
    places_ptr,
    post_ptr,
    mix_ptr,
    pre_ptr,
    weight_ptr,
    out_ptr,
    hidden_ptr,
    packed_ptr,
    scale_ptr,
    stride,
    epsilon,
    NUM_PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """One row. With places, `values` there are added up, then `y`. The next block is read before this one is written;
    the collapse waits in registers for its mean square. PACKED: bytes of a cast row, 0: none is wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    ahead = _load(streams_ptr, y_ptr, row, tl.arange(0, BLOCK), WIDTH)
    places: tl.tuple = ()
    for number in tl.static_range(NUM_PLACES):
        places += (tl.load(places_ptr + row * NUM_PLACES + number).to(tl.int64),)
    post0, post1, post2, post3 = _four(post_ptr + row * 4)
    pre0, pre1, pre2, pre3 = _four(pre_ptr + row * 4)
    mix00, mix01, mix02, mix03 = _four(mix_ptr + row * 16)
    mix10, mix11, mix12, mix13 = _four(mix_ptr + row * 16 + 4)
    mix20, mix21, mix22, mix23 = _four(mix_ptr + row * 16 + 8)
    mix30, mix31, mix32, mix33 = _four(mix_ptr + row * 16 + 12)
    model_dtype = out_ptr.dtype.element_ty
    squares = tl.zeros((BLOCK,), tl.float32)
    blocks: tl.tuple = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        x0 = ahead[0].to(tl.float32)
        x1 = ahead[1].to(tl.float32)
        x2 = ahead[2].to(tl.float32)
        x3 = ahead[3].to(tl.float32)
        y = ahead[4].to(tl.float32)
        if NUM_PLACES > 0:
            total = tl.zeros((BLOCK,), tl.float32)
            for number in tl.static_range(NUM_PLACES):
                known = columns < tl.where(places[number] < 0, 0, WIDTH)
                total += tl.load(values_ptr + places[number] * WIDTH + columns, mask=known, other=0.0).to(tl.float32)
            y = (total + y).to(model_dtype).to(tl.float32)
        if start + BLOCK < WIDTH:
            ahead = _load(streams_ptr, y_ptr, row, columns + BLOCK, WIDTH)
        new0 = (mix00 * x0 + mix10 * x1 + mix20 * x2 + mix30 * x3 + post0 * y).to(model_dtype)
        new1 = (mix01 * x0 + mix11 * x1 + mix21 * x2 + mix31 * x3 + post1 * y).to(model_dtype)
        new2 = (mix02 * x0 + mix12 * x1 + mix22 * x2 + mix32 * x3 + post2 * y).to(model_dtype)
        new3 = (mix03 * x0 + mix13 * x1 + mix23 * x2 + mix33 * x3 + post3 * y).to(model_dtype)
        place = out_ptr + row * (4 * WIDTH) + columns
        tl.store(place, new0, mask=inside)
        tl.store(place + WIDTH, new1, mask=inside)
        tl.store(place + 2 * WIDTH, new2, mask=inside)
        tl.store(place + 3 * WIDTH, new3, mask=inside)
        collapsed = new0.to(tl.float32) * pre0 + new1.to(tl.float32) * pre1
        collapsed = collapsed + new2.to(tl.float32) * pre2 + new3.to(tl.float32) * pre3
        rounded = collapsed.to(model_dtype)
        blocks += (rounded,)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(squares, 0) / WIDTH + epsilon)
    for number in tl.static_range(len(blocks)):
        start = number * BLOCK
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        normed = (weight * (blocks[number].to(tl.float32) * inverse)).to(model_dtype)
        tl.store(hidden_ptr + row * WIDTH + columns, normed, mask=inside)
        if PACKED > 0:
            rows = row + tl.arange(0, 1)
            x = tl.reshape(normed.to(tl.float32), (1, BLOCK))
            store_cast(x, packed_ptr, scale_ptr, rows, rows >= 0, start, WIDTH, stride, 1, BLOCK, PLAIN, PACKED)


@dataclass(slots=True, frozen=True)
class AdvanceStreams:
    """`ops.AdvanceStreams` for four streams."""

    numerics: Numerics

    def __call__(
        self,
        streams: Tensor,
        y: Tensor | ExpertSum,
        post: Tensor,
        mix: Tensor,
        pre: Tensor,
        weight: Tensor,
        *,
        epsilon: float,
        with_cast: bool = False,
    ) -> tuple[Tensor, Activations]:
        num_rows, num, width = streams.shape
        assert num == 4, f"written for 4 streams, not {num}"
        updated = torch.empty(streams.shape, dtype=self.numerics.dtype, device=streams.device)
        hidden = torch.empty(num_rows, width, dtype=self.numerics.dtype, device=streams.device)
        cast = new_cast_rows(num_rows, width, streams.device) if with_cast and width % GROUP == 0 else None
        values, places, y = (y.rows.values, y.rows.places, y.shared) if isinstance(y, ExpertSum) else (y, None, y)
        if num_rows:
            _advance_kernel[(num_rows,)](
                streams.contiguous(),
                y.contiguous(),
                values,
                y if places is None else places.contiguous(),
                post.contiguous(),
                mix.contiguous(),
                pre.contiguous(),
                weight,
                updated,
                hidden,
                hidden if cast is None else cast.packed,
                hidden if cast is None else cast.scales,
                0 if cast is None else cast.scales.stride(1),
                epsilon,
                NUM_PLACES=0 if places is None else places.shape[1],
                WIDTH=width,
                BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
                PACKED=0 if cast is None else cast.packed.shape[1],
                PLAIN=not streams.is_cuda,
                num_warps=_NUM_WARPS,
            )
        return updated, Activations(hidden, cast)


IMPLEMENTATIONS = (triton_kernel("advance_streams", AdvanceStreams),)
