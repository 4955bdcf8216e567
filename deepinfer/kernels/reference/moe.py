"""Routing, experts and their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.elementwise import sigmoid, softplus
from deepinfer.kernels.reference.gemm import activation_values
from deepinfer.kernels.reference.matmul import ROW_TILE, matmul_tiles
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
    """float32 weights, exact: `gate_up` [E, 2 I, D], gates first; `down` [E, D, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(slots=True, frozen=True)
class ExpertMLP:
    """`ops.ExpertMLP`: rows of an expert go through in padded tiles of their own."""

    numerics: Numerics

    def prepare(
        self, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor
    ) -> PreparedExperts:
        gate_up = torch.cat((dequantize_fp4(gate, gate_scale), dequantize_fp4(up, up_scale)), 1)
        return PreparedExperts(gate_up, dequantize_fp4(down, down_scale))

    def __call__(
        self, rows: Tensor, weights: Tensor, tokens_per_expert: Tensor, experts: PreparedExperts, *, limit: float
    ) -> Tensor:
        dtype, (places, tile_experts) = self.numerics.dtype, _place_rows(tokens_per_expert)
        num_rows = len(places)
        values = rows.new_zeros(len(tile_experts) * ROW_TILE, rows.shape[1], dtype=torch.float32)
        values[places] = activation_values(rows[:num_rows], self.numerics)
        gate, up = matmul_tiles(values, experts.gate_up, tile_experts)[places].to(dtype).chunk(2, 1)
        hidden = SwiGLU(self.numerics)(gate, up, limit=limit, weights=weights[:num_rows])
        values = values.new_zeros(len(values), hidden.shape[1])
        values[places] = activation_values(hidden, self.numerics)
        out = torch.full_like(rows, torch.nan, dtype=dtype)
        out[:num_rows] = matmul_tiles(values, experts.down, tile_experts)[places].to(dtype)
        return out


def _place_rows(tokens_per_expert: Tensor) -> tuple[Tensor, list[int]]:
    """Give every expert whole tiles: the place of each of their rows among the padded rows, the expert of each tile."""
    tiles = -(-tokens_per_expert // ROW_TILE)
    expert = torch.repeat_interleave(tokens_per_expert)
    first_row = tokens_per_expert.cumsum(0) - tokens_per_expert
    first_place = (tiles.cumsum(0) - tiles) * ROW_TILE
    rows = torch.arange(len(expert), device=expert.device)
    places = rows - first_row[expert] + first_place[expert]
    return places, torch.repeat_interleave(tiles).tolist()


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
    implementation("route_tokens", lambda _: RouteTokens()),
    implementation("swiglu", SwiGLU),
    implementation("expert_mlp", ExpertMLP),
    implementation("combine_experts", CombineExperts),
)
