"""Which rank holds which expert, and the order in which rows travel."""

from __future__ import annotations

from typing import TypeVar

import torch

Rank = TypeVar("Rank", int, torch.Tensor)


def first_expert(rank: Rank, *, num_ranks: int, num_experts: int) -> Rank:
    """Return the first logical expert of `rank`; `rank == num_ranks` gives the end. Ranks may be a tensor."""
    return rank * num_experts // num_ranks


def order_by_expert(expert_ids: torch.Tensor, *, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (places [T * K], counts [num_experts]) of `expert_ids` [T, K] int64; -1 is no expert.

    `places` are flat indexes `row * K + column`, ordered by (expert, row, column), those of no expert last.
    """
    flat = expert_ids.flatten()
    ordered, places = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=flat.device))
    return places, bounds.diff()
