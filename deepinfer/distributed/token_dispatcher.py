"""Carry token rows to the ranks that hold their experts, and the experts' rows back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True, frozen=True)
class Dispatched:
    """Rows that arrived at this rank, ordered by (local expert, source rank, source row, source column).

    `rows` [N, D] as sent; `weights` [N] float32 routing weights; `tokens_per_expert` [E_local] int64, whose sum is at
    most N: rows behind it belong to nobody.
    `handle` belongs to the dispatcher and goes back to `combine`.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    tokens_per_expert: torch.Tensor
    handle: Any


class TokenDispatcher(Protocol):
    """A collective of all ranks of an expert-parallel group: each `dispatch` needs its `combine` on every rank.

    Rank r of R holds the logical experts `r * E // R .. (r + 1) * E // R - 1`. `batch_invariant`: the rows that come
    back to a token do not depend on which other tokens were sent. `capturable`: nothing waits for the device or has a
    shape that depends on it, so that a graph may hold it.
    """

    rank: int
    num_ranks: int
    batch_invariant: bool
    capturable: bool

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Send `rows` [T, D] to the experts `expert_ids` [T, K] int64 with `weights` [T, K] float32.

        An id of -1 sends nothing (padding rows). T may differ between ranks and may be 0.
        """
        ...

    def combine(self, expert_rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Return the experts' rows to their tokens: `expert_rows` [N, D] in the order of `dispatched.rows`.

        What comes back for rows that belong to nobody may hold anything.

        Returns [T, K, D] in the dtype of `expert_rows`, zeros where the id was -1. Nothing is summed here: the
        token's own rank adds in ascending logical expert id, which keeps the bits independent of placement.
        """
        ...
