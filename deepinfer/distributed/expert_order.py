"""Which rank holds which expert, and the order in which rows travel."""

from __future__ import annotations

import torch


def first_expert(rank: int, *, num_ranks: int, num_experts: int) -> int:
    """Return the first logical expert of `rank`; `rank == num_ranks` gives the end."""
    return rank * num_experts // num_ranks


def order_by_expert(expert_ids: torch.Tensor, *, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (places [N], counts [num_experts]) of the ids that are not -1 in `expert_ids` [T, K] int64.

    `places` are flat indexes `row * K + column`, ordered by (expert, row, column).
    """
    flat = expert_ids.flatten()
    places = (flat >= 0).nonzero().flatten()
    chosen = flat[places]
    counts = torch.bincount(chosen, minlength=num_experts)
    assert len(counts) == num_experts, f"expert id {int(chosen.max())} of {num_experts} experts"
    return places[torch.argsort(chosen, stable=True)], counts


def return_rows(rows: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return [T, K, D] with `rows` [N, D] at the flat `places` [N] and zeros elsewhere; `shape` is (T, K)."""
    num_tokens, num_columns = shape
    combined = rows.new_zeros((num_tokens * num_columns, rows.shape[1]))
    combined[places] = rows
    return combined.view(num_tokens, num_columns, rows.shape[1])
