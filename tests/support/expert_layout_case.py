"""Cases of what the experts' tiles are made from; on a CPU under Triton's interpreter."""

from __future__ import annotations

import torch
from support.op_cases import Bench, same

from deepinfer.kernels.nvidia.expert_layout import lay_out_experts


def check_expert_layout(bench: Bench) -> None:
    """Every copy has a place of its own in a tile of its expert, in order; few copies, many, and none that goes."""
    for num_rows, num_copies, num_experts, tile in ((1, 1, 1, 64), (70, 6, 6, 128), (9000, 2, 3, 128), (40, 6, 96, 64)):
        ids = bench.integers(-1, num_experts, num_rows, num_copies)
        _check_layout(ids, num_experts, tile)
        _check_layout(torch.full_like(ids, -1), num_experts, tile)


def _check_layout(ids: torch.Tensor, num_experts: int, tile: int) -> None:
    layout = lay_out_experts(ids, num_experts=num_experts, tile=tile)
    flat, places = ids.flatten(), layout.places.flatten()
    copies = torch.arange(len(flat), device=ids.device)
    same(places < 0, flat < 0)
    going, taken = flat >= 0, layout.copy >= 0
    own = places[going].long()
    same(layout.expert[own].long(), flat[going])
    same(layout.copy[own].long(), copies[going])
    same(layout.source[own].long(), copies[going] // ids.shape[1])
    for part in (layout.expert, layout.source):
        same(part >= 0, taken)
    assert int(taken.sum()) == int(going.sum())
    tiles = layout.expert.view(-1, tile)
    assert bool(((tiles == tiles.amax(1, keepdim=True)) | (tiles < 0)).all()), "a tile holds one expert"
    for expert in range(num_experts):
        assert bool((layout.copy[layout.expert == expert].diff() > 0).all()), "copies keep their order"
