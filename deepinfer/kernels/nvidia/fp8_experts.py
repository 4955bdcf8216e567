"""Routed experts with FP8 weights: products of DeepGEMM (package sgl-deep-gemm) on Hopper, see `deep_gemm`."""

from __future__ import annotations

from dataclasses import dataclass

import deep_gemm
import torch
from torch import Tensor

from deepinfer.kernels.nvidia.cast_rows import PlacedRows, place_rows, unpack_rows
from deepinfer.kernels.nvidia.casts import GROUP, cast_rows
from deepinfer.kernels.nvidia.expert_layout import ExpertLayout, lay_out_experts
from deepinfer.kernels.nvidia.experts import ExpertMLP as TritonExperts
from deepinfer.kernels.nvidia.experts import Fp4Experts
from deepinfer.kernels.nvidia.fp8_weights import Fp8Weight, recast_fp4
from deepinfer.kernels.nvidia.grouped_fp8 import foresee_tiles, multiply_tiles, swiglu_places
from deepinfer.kernels.ops import Activations, ExpertRows, Numerics
from deepinfer.log import get_logger

_log = get_logger("kernels")


@dataclass(slots=True, frozen=True)
class Fp8Experts:
    """Experts recast to FP8: `gate_up` [E, 2I, D] and `down` [E, D, I]."""

    gate_up: Fp8Weight
    down: Fp8Weight


@dataclass(slots=True, frozen=True)
class UnevenExperts:
    """Experts that FP8 can't hold exactly, in FP4; their rows come cast, as all ranks' do."""

    packed: Fp4Experts


@dataclass(slots=True, frozen=True)
class ExpertMLP:
    """`ops.ExpertMLP` with FP8 weights, a lossless recast at twice the memory, and 1 x 128 activation groups.

    Rows travel cast. Shapes that don't divide by 128, scales too far apart for a lossless recast, and layers with few
    rows go to Triton in FP4.
    """

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
        few_rows: bool = False,
    ) -> Fp8Experts | UnevenExperts | Fp4Experts:
        released = (gate, gate_scale, up, up_scale, down, down_scale)
        if few_rows or gate.shape[1] % GROUP or 2 * gate.shape[2] % GROUP:
            return TritonExperts(self.numerics).prepare(*released)
        gate_up = recast_fp4(torch.cat((gate, up), 1), torch.cat((gate_scale, up_scale), 1))
        recast_down = recast_fp4(down, down_scale)
        if gate_up is None or recast_down is None:
            _log.warning("experts stay FP4, with many rows 2 to 3 times slower: scales of a tile differ by over 2^12")
            return UnevenExperts(TritonExperts(self.numerics).prepare(*released))
        return Fp8Experts(gate_up, recast_down)

    def pack(self, activations: Activations, experts: Fp8Experts | UnevenExperts | Fp4Experts) -> Tensor:
        if isinstance(experts, Fp4Experts):
            return activations.values
        return (activations.cast or cast_rows(activations.values)).packed

    def __call__(
        self,
        rows: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        experts: Fp8Experts | UnevenExperts | Fp4Experts,
        *,
        limit: float,
        expected_copies: int | None = None,
    ) -> ExpertRows:
        if isinstance(experts, UnevenExperts):
            experts = experts.packed
            rows = unpack_rows(rows, width=experts.hidden)
        if isinstance(experts, Fp4Experts):
            packed = TritonExperts(self.numerics)
            return packed(rows, expert_ids, weights, experts, limit=limit, expected_copies=expected_copies)
        width, num_experts = experts.down.codes.shape[1], len(experts.down.codes)
        layout = lay_out_experts(expert_ids, num_experts=num_experts, tile=GROUP)
        if not layout.num_places:
            return ExpertRows(torch.empty(0, width, dtype=torch.bfloat16, device=rows.device), layout.places)
        expected = expert_ids.numel() if expected_copies is None else expected_copies
        num_tiles = layout.num_places // GROUP
        part = GROUP * foresee_tiles(expected, num_experts=num_experts, num_tiles=num_tiles)
        both = _grouped_product(place_rows(rows, layout, width=width, part=part), experts.gate_up, layout)
        hidden = swiglu_places(both, weights, layout, limit=limit, part=part)
        return ExpertRows(_grouped_product(hidden, experts.down, layout), layout.places)


def _grouped_product(x: PlacedRows, weight: Fp8Weight, layout: ExpertLayout) -> Tensor:
    """bf16 [P, N]: of the tiles of the first part by DeepGEMM, of the rest by Triton, with the same sums."""
    part = x.scales.shape[2]
    out = torch.empty(layout.num_places, weight.codes.shape[1], dtype=torch.bfloat16, device=x.codes.device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (x.codes[:part], x.scales[0].t()), (weight.codes, weight.scale), out[:part], layout.expert[:part]
    )
    multiply_tiles(x, weight, layout.expert, out, first=part // GROUP)
    return out
