"""Which rank holds which expert, and the order in which rows travel."""

from __future__ import annotations

import torch


def first_expert(rank: int, *, num_ranks: int, num_experts: int) -> int:
    """Return the first logical expert of `rank`; `rank == num_ranks` gives the end."""
    return rank * num_experts // num_ranks


def order_by_expert(expert_ids: torch.Tensor, *, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (places [T * K], counts [num_experts]) of `expert_ids` [T, K] int64; -1 is no expert.

    `places` are flat indexes `row * K + column`, ordered by (expert, row, column), those of no expert last.
    """
    flat = expert_ids.flatten()
    ordered, places = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=flat.device))
    return places, bounds.diff()


def return_rows(rows: torch.Tensor, places: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Return [T, K, D]: `rows` [N, D] at the first N flat `places`, zeros where `expert_ids` [T, K] is -1.

    N is at least the number of ids that are not -1.
    """
    num_tokens, num_columns = expert_ids.shape
    combined = rows.new_empty((num_tokens * num_columns, rows.shape[1]))
    combined.index_copy_(0, places[: len(rows)], rows)
    nobody = (expert_ids < 0).view(-1, 1)
    return combined.masked_fill_(nobody, 0).view(num_tokens, num_columns, rows.shape[1])
