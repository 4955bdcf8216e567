"""SwiGLU and the sum of experts in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.ops import ExpertRows, Numerics


@triton.jit
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 blocks."""
    gate = tl.minimum(gate, limit)
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def swiglu_halves(both_ptr, rows, inside, columns, limit, WIDTH: tl.constexpr):
    """SwiGLU of `columns` of `rows` int64 that have gate and up side by side, WIDTH columns each; 0 elsewhere."""
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    place = both_ptr + rows[:, None] * (2 * WIDTH) + columns[None, :]
    gate = tl.load(place, mask=wanted, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=wanted, other=0.0).to(tl.float32)
    return swiglu(gate, up, limit)


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    weights_ptr,
    out_ptr,
    gate_stride,
    limit,
    WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values = swiglu(gate, up, limit)
    if WEIGHTED:
        values = tl.load(weights_ptr + row) * values
    tl.store(out_ptr + row * WIDTH + columns, values, mask=inside)


@triton.jit
def _combine_kernel(
    values_ptr, places_ptr, shared_ptr, out_ptr, NUM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for column in tl.static_range(NUM):
        place = tl.load(places_ptr + row * NUM + column).to(tl.int64)
        known = columns < tl.where(place < 0, 0, WIDTH)
        total += tl.load(values_ptr + place * WIDTH + columns, mask=known, other=0.0).to(tl.float32)
    total += tl.load(shared_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, total, mask=inside)


@dataclass(slots=True, frozen=True)
class SwiGLU:
    """Like the reference's; gate and up [T, I] may be halves of one product."""

    numerics: Numerics

    def __call__(self, gate: Tensor, up: Tensor, *, limit: float, weights: Tensor | None = None) -> Tensor:
        num_rows, width = gate.shape
        if gate.stride() != up.stride() or gate.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty(num_rows, width, dtype=self.numerics.dtype, device=gate.device)
        if num_rows:
            block = min(1024, triton.next_power_of_2(width))
            _swiglu_kernel[(num_rows, triton.cdiv(width, block))](
                gate,
                up,
                out if weights is None else weights.contiguous(),
                out,
                gate.stride(0),
                limit,
                WEIGHTED=weights is not None,
                WIDTH=width,
                BLOCK=block,
            )
        return out


@dataclass(slots=True, frozen=True)
class CombineExperts:
    """`ops.CombineExperts`."""

    numerics: Numerics

    def __call__(self, expert_rows: ExpertRows, shared: Tensor) -> Tensor:
        (num_rows, num_columns), hidden = expert_rows.places.shape, shared.shape[1]
        out = torch.empty(num_rows, hidden, dtype=self.numerics.dtype, device=shared.device)
        if num_rows:
            block = min(1024, triton.next_power_of_2(hidden))
            _combine_kernel[(num_rows, triton.cdiv(hidden, block))](
                expert_rows.values,
                expert_rows.places.contiguous(),
                shared.contiguous(),
                out,
                NUM=num_columns,
                WIDTH=hidden,
                BLOCK=block,
            )
        return out


IMPLEMENTATIONS = (triton_kernel("combine_experts", CombineExperts),)
