"""The dispatcher of a single rank, which holds all experts: rows are only put in order."""

from __future__ import annotations

import torch

from deepinfer.distributed.expert_order import order_by_expert, return_rows
from deepinfer.distributed.token_dispatcher import Dispatched


class LocalDispatcher:
    """See `token_dispatcher.TokenDispatcher`; `Dispatched.handle` is (places [T * K], expert ids [T, K]).

    Nothing depends on how many ids are -1: N is always T * K.
    """

    batch_invariant = True
    capturable = True

    def __init__(self, num_experts: int) -> None:
        """Serve `num_experts` logical experts."""
        self.rank = 0
        self.num_ranks = 1
        self._num_experts = num_experts

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Order the rows of all tokens by expert."""
        places, counts = order_by_expert(expert_ids, num_experts=self._num_experts)
        return Dispatched(
            rows=rows[places // expert_ids.shape[1]],
            weights=weights.flatten()[places],
            tokens_per_expert=counts,
            handle=(places, expert_ids),
        )

    def combine(self, expert_rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Put the experts' rows back to their tokens."""
        places, expert_ids = dispatched.handle
        return return_rows(expert_rows, places, expert_ids)
