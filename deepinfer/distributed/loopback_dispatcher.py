"""The dispatcher of one rank that stands for a whole group: it gets back the traffic that such a rank would get."""

from __future__ import annotations

import math

import torch

from deepinfer.distributed.expert_order import first_expert
from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.kernels.ops import ExpertRows


class LoopbackDispatcher:
    """See `token_dispatcher.TokenDispatcher`; for benchmarks only, since answers are those of other experts.

    With equal ranks and balanced routing a rank receives as many rows as it sends, T * K, and each of its E local
    experts gets the same share of them. Here the rank's own rows come back as those: copy (row, column) goes to the
    local expert that is due, whatever its id.

    Left out: the exchange itself, both ways, and waiting for slower ranks. A received row is also one of T rows that
    lie close together, where in a group nearly all T * K would be different ones.

    `shares` [E]: how the rows are spread over the local experts, in place of equally (in any unit; 0: it gets none).
    """

    batch_invariant = True
    capturable = True

    def __init__(self, num_experts: int, *, rank: int, num_ranks: int, shares: tuple[float, ...] | None = None) -> None:
        """Stand for `rank` of `num_ranks` that hold `num_experts` logical experts together."""
        self.rank = rank
        self.num_ranks = num_ranks
        begin, end = (first_expert(number, num_ranks=num_ranks, num_experts=num_experts) for number in (rank, rank + 1))
        self.num_local = end - begin
        assert self.num_local > 0, f"rank {rank} of {num_ranks} holds none of {num_experts} experts"
        assert shares is None or len(shares) == self.num_local, f"{shares} for {self.num_local} experts"
        self._shares = shares or (1.0,) * self.num_local
        self._local = LocalDispatcher(self.num_local)
        self._experts: torch.Tensor | None = None  # of as many cards as were ever dealt at once

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Give the rows to the experts that are due."""
        signs = _halves(expert_ids)[..., 1:]  # 0, or -1 where the id is: one kernel, as small as they come
        due = _halves(self._due(expert_ids)) | signs
        return self._local.dispatch(rows, due.view(torch.int64).squeeze(-1), weights)

    def combine(self, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        """Hand the experts' rows back to their tokens."""
        return self._local.combine(expert_rows, dispatched)

    def _due(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The local expert of each (row, column), int64 [T, K]."""
        count = expert_ids.numel()
        if self._experts is None or len(self._experts) < count:
            self._experts = deal(count, self._shares).to(expert_ids.device)
        return self._experts[:count].view(expert_ids.shape)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """The lower and the upper halves of `numbers` int64 [T, K]: int32 [T, K, 2]."""
    return numbers.view(torch.int32).view(*numbers.shape, 2)


def deal(count: int, shares: tuple[float, ...]) -> torch.Tensor:
    """Return int64 [count]: which of the hands each card goes to, so that every beginning is dealt by `shares`."""
    total = sum(shares)
    periods = [total / share if share else math.inf for share in shares]
    dues = [(torch.arange(1 + int(count / period)) + 0.5) * period for period in periods]
    hands = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor([len(due) for due in dues]))
    return hands[torch.cat(dues).argsort(stable=True)[:count]]
