"""Routed experts in Triton from the released FP4 weights: the portable choice, with 1 x 32 activation scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.nvidia.casts import fp8_values
from deepinfer.kernels.nvidia.expert_layout import ExpertLayout, lay_out_experts
from deepinfer.kernels.nvidia.moe import SwiGLU
from deepinfer.kernels.nvidia.number_formats import decode_e2m1, decode_e8m0, spread
from deepinfer.kernels.ops import ExpertRows, Numerics

_TILE = 64


@triton.jit
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    expert_ptr,
    source_ptr,
    GATHER: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of one expert's rows times its FP4 weights [N, K / 2] -> out [place, N]; x by row or by place."""
    places = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(expert_ptr + tl.program_id(1) * ROWS).to(tl.int64)
    if expert >= 0:
        source = tl.load(source_ptr + places).to(tl.int64)
        inside = source >= 0
        if not GATHER:
            source = places
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        weight_ptr += expert * N * (K // 2)
        scale_ptr += expert * N * (K // 32)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            wanted = inside[:, None] & (depth < K)[None, :]
            x = tl.load(x_ptr + source[:, None] * K + depth[None, :], mask=wanted, other=0.0)
            half = start // 2 + tl.arange(0, DEPTH // 2)
            known = (columns < N)[:, None] & (half < K // 2)[None, :]
            codes = tl.load(weight_ptr + columns[:, None] * (K // 2) + half[None, :], mask=known, other=0).to(tl.int32)
            group = start // 32 + tl.arange(0, DEPTH // 32)
            known = (columns < N)[:, None] & (group < K // 32)[None, :]
            scale = tl.load(scale_ptr + columns[:, None] * (K // 32) + group[None, :], mask=known, other=0)
            values = tl.reshape(tl.join(decode_e2m1(codes & 15), decode_e2m1(codes >> 4)), (COLUMNS, DEPTH))
            values *= spread(decode_e8m0(scale.to(tl.int32)), COLUMNS, DEPTH // 32, 32)
            total = tl.dot(x, tl.trans(values.to(tl.bfloat16)), total)
        mask = inside[:, None] & (columns < N)[None, :]
        tl.store(out_ptr + places[:, None] * N + columns[None, :], total, mask=mask)


@dataclass(slots=True, frozen=True)
class Fp4Weights:
    """Weights of the experts as released; see `ops.ExpertMLP`."""

    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor


@dataclass(slots=True, frozen=True)
class ExpertMLP:
    """`ops.ExpertMLP` in bf16."""

    numerics: Numerics

    def prepare(
        self,
        gate: Tensor,
        gate_scale: Tensor,
        up: Tensor,
        up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        *,
        few_rows: bool = False,  # noqa: ARG002  packed in any case
    ) -> Fp4Weights:
        return Fp4Weights(gate, gate_scale, up, up_scale, down, down_scale)

    def __call__(
        self, rows: Tensor, expert_ids: Tensor, weights: Tensor, experts: Fp4Weights, *, limit: float
    ) -> ExpertRows:
        layout = lay_out_experts(expert_ids, num_experts=len(experts.down), tile=_TILE)
        if not layout.num_places:
            return ExpertRows(rows[:0], layout.places)
        x = self._cast(rows)
        gate = _product(x, experts.gate, experts.gate_scale, layout, gather=True)
        up = _product(x, experts.up, experts.up_scale, layout, gather=True)
        factors = weights.flatten()[layout.copy.clamp_min(0)]
        hidden = self._cast(SwiGLU(self.numerics)(gate, up, limit=limit, weights=factors))
        return ExpertRows(_product(hidden, experts.down, experts.down_scale, layout, gather=False), layout.places)

    def _cast(self, x: Tensor) -> Tensor:
        return fp8_values(x) if self.numerics.quantise_activations else x


def _product(x: Tensor, weight: Tensor, scale: Tensor, layout: ExpertLayout, *, gather: bool) -> Tensor:
    """[P, N] in the padded places; those of no row are unwritten."""
    _, n, half = weight.shape
    out = torch.empty(layout.num_places, n, dtype=x.dtype, device=x.device)
    _grouped_kernel[(triton.cdiv(n, 64), layout.num_places // _TILE)](
        x,
        weight,
        scale,
        out,
        layout.expert,
        layout.source,
        GATHER=gather,
        N=n,
        K=2 * half,
        ROWS=_TILE,
        COLUMNS=64,
        DEPTH=64,
    )
    return out


IMPLEMENTATIONS = (triton_kernel("expert_mlp", ExpertMLP, dtypes=BF16),)
