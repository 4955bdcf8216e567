"""The dispatcher of a single rank, which holds all experts."""

from __future__ import annotations

import torch

from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.kernels.ops import ExpertRows


class LocalDispatcher:
    """See `token_dispatcher.TokenDispatcher`: nothing travels, and `num_experts` logical experts are all here."""

    batch_invariant = True
    capturable = True

    def __init__(self, num_experts: int) -> None:
        self.rank = 0
        self.num_ranks = 1
        self.num_experts = num_experts

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """The rows as they are."""
        assert len(rows) == len(expert_ids) == len(weights), (rows.shape, expert_ids.shape, weights.shape)
        return Dispatched(
            rows=rows, expert_ids=expert_ids, weights=weights, expected_copies=expert_ids.numel(), handle=None
        )

    def combine(self, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        """The experts' rows as they are."""
        assert expert_rows.places.shape == dispatched.expert_ids.shape, expert_rows.places.shape
        return expert_rows
