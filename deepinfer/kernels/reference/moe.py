"""Routing, routed experts and their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Activations, ExpertRows, Numerics
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.elementwise import softplus
from deepinfer.kernels.reference.gemm import activation_values
from deepinfer.kernels.reference.matmul import ROW_TILE, matmul_rows, matmul_tiles
from deepinfer.kernels.reference.quantize import dequantize_fp4
from deepinfer.kernels.reference.swiglu import SwiGLU


@dataclass(slots=True, frozen=True)
class RouteTokens:
    """`ops.RouteTokens`; the sum of the chosen scores runs from the best expert down. The router becomes float32."""

    def prepare(self, router: Tensor) -> Tensor:
        return router.float()

    def __call__(
        self, hidden: Tensor, router: Tensor, bias: Tensor, is_padding: Tensor, *, num_chosen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = torch.sqrt(softplus(matmul_rows(hidden.float(), router)))
        order = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :num_chosen]
        chosen = scores.gather(1, order)
        total = chosen[:, 0]
        for column in range(1, num_chosen):
            total = total + chosen[:, column]
        weights = chosen / (total + 1e-20).unsqueeze(1) * scale
        ids, places = order.sort(dim=1)
        return ids.masked_fill(is_padding.unsqueeze(1), -1), weights.gather(1, places)


@dataclass(slots=True, frozen=True)
class PreparedExperts:
    """float32 weights, exact: `gate_up` [E, 2 I, D], gates first; `down` [E, D, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(slots=True, frozen=True)
class ExpertMLP:
    """`ops.ExpertMLP`: copies that go to an expert go through in padded tiles of their own."""

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
        few_rows: bool = False,  # noqa: ARG002  unpacked in any case
    ) -> PreparedExperts:
        gate_up = torch.cat((dequantize_fp4(gate, gate_scale), dequantize_fp4(up, up_scale)), 1)
        return PreparedExperts(gate_up, dequantize_fp4(down, down_scale))

    def pack(self, activations: Activations, experts: PreparedExperts) -> Tensor:  # noqa: ARG002
        return activations.values

    def __call__(
        self,
        rows: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        experts: PreparedExperts,
        *,
        limit: float,
        expected_copies: int | None = None,  # noqa: ARG002  no bound of anything here
    ) -> ExpertRows:
        copies, counts = _order_copies(expert_ids, num_experts=len(experts.down))
        tile_places, tile_experts = _place_copies(counts)
        sources, dtype = copies // expert_ids.shape[1], self.numerics.dtype
        values = rows.new_zeros(len(tile_experts) * ROW_TILE, rows.shape[1], dtype=torch.float32)
        values[tile_places] = activation_values(rows[sources], self.numerics)
        gate, up = matmul_tiles(values, experts.gate_up, tile_experts)[tile_places].to(dtype).chunk(2, 1)
        hidden = SwiGLU(self.numerics)(gate, up, limit=limit, weights=weights.flatten()[copies])
        values = values.new_zeros(len(values), hidden.shape[1])
        values[tile_places] = activation_values(hidden, self.numerics)
        places = torch.full_like(expert_ids, -1).flatten()
        places[copies] = tile_places
        return ExpertRows(matmul_tiles(values, experts.down, tile_experts).to(dtype), places.view_as(expert_ids))


def _order_copies(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """The flat numbers [n] of the copies that go to an expert, ordered by expert, and how many each expert gets."""
    flat = expert_ids.flatten()
    copies = (flat >= 0).nonzero().squeeze(1)
    chosen = flat[copies]
    return copies[torch.argsort(chosen, stable=True)], torch.bincount(chosen, minlength=num_experts)


def _place_copies(counts: Tensor) -> tuple[Tensor, list[int]]:
    """Give every expert whole tiles: the place of each of its copies among the padded rows, the expert of each tile."""
    tiles = -(-counts // ROW_TILE)
    expert = torch.repeat_interleave(counts)
    first_copy = counts.cumsum(0) - counts
    first_place = (tiles.cumsum(0) - tiles) * ROW_TILE
    copies = torch.arange(len(expert), device=expert.device)
    places = copies - first_copy[expert] + first_place[expert]
    return places, torch.repeat_interleave(tiles).tolist()


@dataclass(slots=True, frozen=True)
class CombineExperts:
    """`ops.CombineExperts`."""

    numerics: Numerics

    def __call__(self, expert_rows: ExpertRows, shared: Tensor) -> Tensor:
        nothing = expert_rows.values.new_zeros(1, shared.shape[1])
        values, places = torch.cat((expert_rows.values, nothing)), expert_rows.places  # -1 is the last row
        total = values[places[:, 0]].float()
        for column in range(1, places.shape[1]):
            total = total + values[places[:, column]].float()
        return (total + shared.float()).to(self.numerics.dtype)


IMPLEMENTATIONS = (
    implementation("route_tokens", lambda _: RouteTokens()),
    implementation("expert_mlp", ExpertMLP),
    implementation("combine_experts", CombineExperts),
)
