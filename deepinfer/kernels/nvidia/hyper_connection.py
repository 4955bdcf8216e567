"""Hyper-connections in Triton: coefficients with Sinkhorn, collapse and update of the residual streams.

The product with the float32 function runs on the matrix units: each of its numbers is rounded to a sum of two bf16
numbers (17 bits), the streams are bf16 already, and products of two bf16 numbers are exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.nvidia.fences import fence_copies
from deepinfer.kernels.ops import MixCoefficients, Numerics

_SPLITS = 32  # fixed, so that the order of summation never depends on the number of rows
_BLOCK_ROWS = 64
_BLOCK_COLUMNS = 64
_COEFFICIENT_ROWS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    streams_ptr,
    function_ptr,
    partial_ptr,
    num_rows,
    OUT: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Partial results [row, split, OUT_BLOCK] over one range of columns: OUT products, then the sum of squares."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    outs = tl.arange(0, OUT_BLOCK)
    halves = tl.arange(0, 2 * OUT_BLOCK)  # both parts of an output side by side
    function_rows = (halves % 2) * OUT + halves // 2
    negative = tl.zeros((ROWS, 2 * OUT_BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, SPLIT_COLUMNS, BLOCK):
        columns = split * SPLIT_COLUMNS + start + tl.arange(0, BLOCK)
        inside = columns < COLUMNS
        mask = (rows < num_rows)[:, None] & inside[None, :]
        x = tl.load(streams_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :], mask=mask, other=0.0)
        wanted = inside[:, None] & (halves < 2 * OUT)[None, :]
        place = function_ptr + function_rows[None, :] * COLUMNS + columns[:, None]
        part = tl.load(place, mask=wanted, other=0.0)
        fence_copies(PLAIN)
        # The product must end before x of a later step is copied where it reads. Triton 3.6 does not see to that: a
        # block that is read by something else than products, too, gets one place too few. A difference waits for the
        # product; a sum would become part of it.
        negative -= tl.dot(x, part)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    high, low = tl.split(tl.reshape(negative, (ROWS, OUT_BLOCK, 2)))
    sums = tl.where((outs == OUT)[None, :], squares[:, None], -(high + low))
    place = (rows.to(tl.int64) * SPLITS + split) * OUT_BLOCK
    tl.store(partial_ptr + place[:, None] + outs[None, :], sums, mask=(rows < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _coefficients_kernel(
    partial_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    mix_ptr,
    num_rows,
    epsilon,
    mix_epsilon,
    NUM: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row's sums lie as groups of NUM: pre, post, the rows of mix, the sum of squares and nothing."""
    OUT: tl.constexpr = 2 * NUM + NUM * NUM
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None]
    outs = tl.arange(0, OUT_BLOCK)
    place = (rows.to(tl.int64)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :])[:, :, None] * OUT_BLOCK
    scale = tl.load(scale_ptr + tl.minimum(outs // NUM, 2))
    base = tl.load(base_ptr + outs, mask=outs < OUT, other=0.0)
    sums = tl.sum(tl.load(partial_ptr + place + outs[None, None, :], mask=inside[:, :, None], other=0.0), 1)
    squares = tl.sum(tl.where((outs == OUT)[None, :], sums, 0.0), 1)
    inverse = tl.rsqrt(squares / COLUMNS + epsilon)
    logits = sums * inverse[:, None] * scale[None, :] + base[None, :]
    gate = 1.0 / (1.0 + tl.exp(-logits))
    small = rows[:, None] * NUM + outs[None, :]
    tl.store(pre_ptr + small, gate + mix_epsilon, mask=inside & (outs < NUM)[None, :])
    tl.store(post_ptr + small - NUM, 2.0 * gate, mask=inside & ((outs >= NUM) & (outs < 2 * NUM))[None, :])
    groups = tl.arange(0, OUT_BLOCK // NUM)
    is_mix = ((groups >= 2) & (groups < 2 + NUM))[None, :, None]
    mix = tl.reshape(logits, (ROWS, OUT_BLOCK // NUM, NUM))
    mix = tl.exp(mix - tl.max(mix, 2)[:, :, None])
    mix = tl.where(is_mix, mix / tl.sum(mix, 2)[:, :, None] + mix_epsilon, 0.0)
    mix = mix / (tl.sum(mix, 1)[:, None, :] + mix_epsilon)
    for _ in range(ITERATIONS - 1):
        # rows of other groups stay zero, whatever mix_epsilon is
        mix = tl.where(is_mix, mix / (tl.sum(mix, 2)[:, :, None] + mix_epsilon), 0.0)
        mix = mix / (tl.sum(mix, 1)[:, None, :] + mix_epsilon)
    place = mix_ptr + rows[:, None, None] * (NUM * NUM) + (groups[:, None] - 2) * NUM + tl.arange(0, NUM)[None, :]
    tl.store(place, mix, mask=inside[:, :, None] & is_mix)


@triton.jit
def _collapse_kernel(streams_ptr, pre_ptr, out_ptr, NUM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(NUM):
        x = tl.load(streams_ptr + (row * NUM + stream) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        total += x * tl.load(pre_ptr + row * NUM + stream)
    tl.store(out_ptr + row * WIDTH + columns, total, mask=inside)


@triton.jit
def _update_kernel(
    streams_ptr, y_ptr, post_ptr, mix_ptr, out_ptr, NUM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < WIDTH)[None, :]
    streams = tl.arange(0, NUM)
    place = (row * NUM + streams)[:, None] * WIDTH + columns[None, :]
    y = tl.load(y_ptr + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros((NUM, BLOCK), tl.float32)
    for source in tl.static_range(NUM):
        x = tl.load(streams_ptr + (row * NUM + source) * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        weights = tl.load(mix_ptr + (row * NUM + source) * NUM + streams)
        total += weights[:, None] * x.to(tl.float32)[None, :]
    total += tl.load(post_ptr + row * NUM + streams)[:, None] * y[None, :]
    tl.store(out_ptr + place, total, mask=inside)


@dataclass(slots=True, frozen=True)
class MixCoefficientsOf:
    """`ops.MixCoefficientsOf` for bf16 streams; the prepared function is bf16 [2, 2M + M*M, M*D], to be added up."""

    def prepare(self, function: Tensor) -> Tensor:
        parts, rest = [], function.float()
        for _ in range(2):
            parts.append(rest.to(torch.bfloat16))
            rest = rest - parts[-1].float()
        return torch.stack(parts)

    def __call__(
        self,
        streams: Tensor,
        function: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        epsilon: float,
        mix_epsilon: float,
        num_iterations: int,
    ) -> MixCoefficients:
        num_rows, num, hidden = streams.shape
        columns, out_block = num * hidden, max(16, triton.next_power_of_2(len(base) + 1))
        new = streams.new_empty
        pre, post = new(num_rows, num, dtype=torch.float32), new(num_rows, num, dtype=torch.float32)
        mix = new(num_rows, num, num, dtype=torch.float32)
        if not num_rows:
            return MixCoefficients(pre, post, mix)
        partial = new(num_rows, _SPLITS, out_block, dtype=torch.float32)
        split_columns = triton.cdiv(triton.cdiv(columns, _SPLITS), _BLOCK_COLUMNS) * _BLOCK_COLUMNS
        _product_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS), _SPLITS)](
            streams.contiguous(),
            function,
            partial,
            num_rows,
            OUT=len(base),
            OUT_BLOCK=out_block,
            COLUMNS=columns,
            SPLITS=_SPLITS,
            SPLIT_COLUMNS=split_columns,
            ROWS=_BLOCK_ROWS,
            BLOCK=_BLOCK_COLUMNS,
            PLAIN=not streams.is_cuda,
            num_stages=4,
        )
        _coefficients_kernel[(triton.cdiv(num_rows, _COEFFICIENT_ROWS),)](
            partial,
            scale,
            base,
            pre,
            post,
            mix,
            num_rows,
            epsilon,
            mix_epsilon,
            NUM=num,
            OUT_BLOCK=out_block,
            COLUMNS=columns,
            SPLITS=_SPLITS,
            ITERATIONS=num_iterations,
            ROWS=_COEFFICIENT_ROWS,
            num_warps=1,
        )
        return MixCoefficients(pre, post, mix)


@dataclass(slots=True, frozen=True)
class CollapseStreams:
    """`ops.CollapseStreams`."""

    numerics: Numerics

    def __call__(self, streams: Tensor, pre: Tensor) -> Tensor:
        num_rows, num, hidden = streams.shape
        out = torch.empty(num_rows, hidden, dtype=self.numerics.dtype, device=streams.device)
        if num_rows:
            block = min(1024, triton.next_power_of_2(hidden))
            grid = (num_rows, triton.cdiv(hidden, block))
            _collapse_kernel[grid](streams.contiguous(), pre.contiguous(), out, NUM=num, WIDTH=hidden, BLOCK=block)
        return out


@dataclass(slots=True, frozen=True)
class UpdateStreams:
    """`ops.UpdateStreams`."""

    numerics: Numerics

    def __call__(self, streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        num_rows, num, hidden = streams.shape
        out = torch.empty(streams.shape, dtype=self.numerics.dtype, device=streams.device)
        if num_rows:
            block = min(1024, triton.next_power_of_2(hidden))
            _update_kernel[(num_rows, triton.cdiv(hidden, block))](
                streams.contiguous(),
                y.contiguous(),
                post.contiguous(),
                mix.contiguous(),
                out,
                NUM=num,
                WIDTH=hidden,
                BLOCK=block,
            )
        return out


IMPLEMENTATIONS = (
    triton_kernel("mix_coefficients", lambda _: MixCoefficientsOf(), dtypes=BF16),
    triton_kernel("collapse_streams", CollapseStreams),
    triton_kernel("update_streams", UpdateStreams),
)
