"""Routing, experts and their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.elementwise import sigmoid, softplus
from deepinfer.kernels.reference.gemm import activation_values
from deepinfer.kernels.reference.matmul import matmul_rows
from deepinfer.kernels.reference.quantize import dequantize_fp4


@dataclass(slots=True, frozen=True)
class RouteTokens:
    """`ops.RouteTokens`; the sum of the chosen scores runs from the best expert down."""

    def __call__(self, logits: Tensor, bias: Tensor, *, num_chosen: int, scale: float) -> tuple[Tensor, Tensor]:
        scores = torch.sqrt(softplus(logits))
        order = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :num_chosen]
        chosen = scores.gather(1, order)
        total = chosen[:, 0]
        for column in range(1, num_chosen):
            total = total + chosen[:, column]
        weights = chosen / (total + 1e-20).unsqueeze(1) * scale
        ids, places = order.sort(dim=1)
        return ids, weights.gather(1, places)


@dataclass(slots=True, frozen=True)
class SwiGLU:
    """`ops.SwiGLU`."""

    numerics: Numerics

    def __call__(self, gate: Tensor, up: Tensor, *, limit: float, weights: Tensor | None = None) -> Tensor:
        opened = gate.float().clamp_max(limit)
        values = opened * sigmoid(opened) * up.float().clamp(-limit, limit)
        if weights is not None:
            values = weights.unsqueeze(1) * values
        return values.to(self.numerics.dtype)


@dataclass(slots=True, frozen=True)
class PreparedExperts:
    """float32 weights, exact: `gate`, `up` [E, I, D], `down` [E, D, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(slots=True, frozen=True)
class ExpertMLP:
    """`ops.ExpertMLP`: one expert after the other."""

    numerics: Numerics

    def prepare(
        self, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor
    ) -> PreparedExperts:
        return PreparedExperts(
            gate=dequantize_fp4(gate, gate_scale), up=dequantize_fp4(up, up_scale), down=dequantize_fp4(down, down_scale)
        )

    def __call__(
        self, rows: Tensor, weights: Tensor, tokens_per_expert: Tensor, experts: PreparedExperts, *, limit: float
    ) -> Tensor:
        dtype, swiglu = self.numerics.dtype, SwiGLU(self.numerics)
        values = activation_values(rows, self.numerics)
        out = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(tokens_per_expert.tolist()):
            if count:
                own = slice(start, start + count)
                gate = matmul_rows(values[own], experts.gate[expert]).to(dtype)
                up = matmul_rows(values[own], experts.up[expert]).to(dtype)
                hidden = swiglu(gate, up, limit=limit, weights=weights[own])
                out[own] = matmul_rows(activation_values(hidden, self.numerics), experts.down[expert]).to(dtype)
                start += count
        return out


@dataclass(slots=True, frozen=True)
class CombineExperts:
    """`ops.CombineExperts`."""

    numerics: Numerics

    def __call__(self, expert_rows: Tensor, shared: Tensor) -> Tensor:
        total = expert_rows[:, 0].float()
        for column in range(1, expert_rows.shape[1]):
            total = total + expert_rows[:, column].float()
        return (total + shared.float()).to(self.numerics.dtype)


IMPLEMENTATIONS = (
    implementation("route_tokens", lambda numerics: RouteTokens()),
    implementation("swiglu", SwiGLU),
    implementation("expert_mlp", ExpertMLP),
    implementation("combine_experts", CombineExperts),
)
