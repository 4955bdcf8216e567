"""Hyper-connections in Triton: coefficients with Sinkhorn, collapse and update of the residual streams.

The product with the float32 function runs on the matrix units without losing bits: every float32 is a sum of three
bf16 numbers, the streams are bf16 already, and products of two bf16 numbers are exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.ops import MixCoefficients, Numerics

_SPLITS = 32  # fixed, so that the order of summation never depends on the number of rows
_BLOCK_ROWS = 64
_COEFFICIENT_ROWS = 8
_BLOCK_COLUMNS = 64


@triton.jit
def _product_kernel(
    streams_ptr,
    function_ptr,
    partial_ptr,
    squares_ptr,
    num_rows,
    OUT: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial products [split, row, OUT_BLOCK] and sums of squares [split, row] over one range of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.arange(0, OUT_BLOCK)
    first = tl.program_id(1) * SPLIT_COLUMNS
    total = tl.zeros((ROWS, OUT_BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, SPLIT_COLUMNS, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        columns = first + offset
        inside = (offset < SPLIT_COLUMNS) & (columns < COLUMNS)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        x = tl.load(streams_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :], mask=mask, other=0.0)
        place = function_ptr + outs[None, :] * COLUMNS + columns[:, None]
        wanted = inside[:, None] & (outs < OUT)[None, :]
        # The last product must end before x of a later step is copied where it reads. Triton 3.6 does not see to that:
        # a block that is read by something else than products, too, gets one place too few. The sum makes it wait.
        product = tl.zeros((ROWS, OUT_BLOCK), tl.float32)
        for part in tl.static_range(3):
            weight = tl.load(place + part * OUT * COLUMNS, mask=wanted, other=0.0)
            product = tl.dot(x, weight, product)
        total += product
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    place = tl.program_id(1).to(tl.int64) * num_rows + rows
    tl.store(partial_ptr + place[:, None] * OUT_BLOCK + outs[None, :], total, mask=(rows < num_rows)[:, None])
    tl.store(squares_ptr + place, squares, mask=rows < num_rows)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _coefficients_kernel(
    partial_ptr,
    squares_ptr,
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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    one = tl.arange(0, NUM)
    square = NUM * one[None, :, None] + one[None, None, :]
    squares = tl.zeros((ROWS,), tl.float32)
    pre = tl.zeros((ROWS, NUM), tl.float32)
    post = tl.zeros((ROWS, NUM), tl.float32)
    mix = tl.zeros((ROWS, NUM, NUM), tl.float32)
    for split in tl.static_range(SPLITS):
        place = split * num_rows + rows
        squares += tl.load(squares_ptr + place, mask=inside, other=0.0)
        row_ptr = partial_ptr + place.to(tl.int64) * OUT_BLOCK
        pre += tl.load(row_ptr[:, None] + one[None, :], mask=inside[:, None], other=0.0)
        post += tl.load(row_ptr[:, None] + NUM + one[None, :], mask=inside[:, None], other=0.0)
        mix += tl.load(row_ptr[:, None, None] + 2 * NUM + square, mask=inside[:, None, None], other=0.0)
    inverse = tl.rsqrt(squares / COLUMNS + epsilon)
    pre = pre * inverse[:, None] * tl.load(scale_ptr) + tl.load(base_ptr + one)[None, :]
    post = post * inverse[:, None] * tl.load(scale_ptr + 1) + tl.load(base_ptr + NUM + one)[None, :]
    mix = mix * inverse[:, None, None] * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * NUM + square)
    mix = tl.exp(mix - tl.max(mix, 2)[:, :, None])
    mix = mix / tl.sum(mix, 2)[:, :, None] + mix_epsilon
    mix = mix / (tl.sum(mix, 1)[:, None, :] + mix_epsilon)
    for _ in range(ITERATIONS - 1):
        mix = mix / (tl.sum(mix, 2)[:, :, None] + mix_epsilon)
        mix = mix / (tl.sum(mix, 1)[:, None, :] + mix_epsilon)
    place = rows.to(tl.int64)[:, None] * NUM + one[None, :]
    tl.store(pre_ptr + place, _sigmoid(pre) + mix_epsilon, mask=inside[:, None])
    tl.store(post_ptr + place, 2.0 * _sigmoid(post), mask=inside[:, None])
    tl.store(mix_ptr + rows.to(tl.int64)[:, None, None] * NUM * NUM + square, mix, mask=inside[:, None, None])


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
    """`ops.MixCoefficientsOf` for bf16 streams; the prepared function is bf16 [3, 2M + M*M, M*D], to be added up."""

    def prepare(self, function: Tensor) -> Tensor:
        parts, rest = [], function.float()
        for _ in range(3):
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
        columns, out_block = num * hidden, max(16, triton.next_power_of_2(len(base)))
        new = streams.new_empty
        pre, post = new(num_rows, num, dtype=torch.float32), new(num_rows, num, dtype=torch.float32)
        mix = new(num_rows, num, num, dtype=torch.float32)
        if not num_rows:
            return MixCoefficients(pre, post, mix)
        partial = new(_SPLITS, num_rows, out_block, dtype=torch.float32)
        squares = new(_SPLITS, num_rows, dtype=torch.float32)
        split_columns = triton.cdiv(triton.cdiv(columns, _SPLITS), _BLOCK_COLUMNS) * _BLOCK_COLUMNS
        _product_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS), _SPLITS)](
            streams.contiguous(),
            function,
            partial,
            squares,
            num_rows,
            OUT=len(base),
            OUT_BLOCK=out_block,
            COLUMNS=columns,
            SPLIT_COLUMNS=split_columns,
            ROWS=_BLOCK_ROWS,
            BLOCK=_BLOCK_COLUMNS,
        )
        _coefficients_kernel[(triton.cdiv(num_rows, _COEFFICIENT_ROWS),)](
            partial,
            squares,
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
