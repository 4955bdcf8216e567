"""What `deep_ep` promises and no more, over gloo: rows once to a rank, in any order, answers added on the way."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer.distributed.process_groups import Group
from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.kernels.ops import ExpertRows


@dataclass(frozen=True)
class _Handle:
    """`recv_src_metadata` [R, 2 + K]: where each arrival comes from; the rest is the fake's own."""

    recv_src_metadata: torch.Tensor
    shuffle: torch.Tensor
    arrived: Dispatched


class ElasticBuffer:
    """One rank's buffer. `group` is what the adapter gives, of which the fake uses the gloo group inside."""

    def __init__(self, group: Any, *, num_bytes: int, **_: Any) -> None:
        self.num_bytes = num_bytes
        self.num_scaleout_ranks, self.num_scaleup_ranks = group.size(), 1  # each rank in a host of its own
        self.sizes: list[int] = []
        gloo: Group = group._group
        self._carrier = TorchDispatcher(gloo, gloo.num_ranks)  # one "expert" a rank
        assert (group.rank(), group.size()) == (gloo.rank, gloo.num_ranks)
        group.barrier()

    @staticmethod
    def get_buffer_size_hint(group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> int:
        return group.size() * num_max_tokens_per_rank * hidden * 2 * num_topk

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        weights = torch.zeros(topk_idx.shape) if topk_weights is None else topk_weights
        assert all(tensor.is_contiguous() for tensor in (x, topk_idx, weights))
        assert len(x) == len(topk_idx) == len(weights) <= num_max_tokens_per_rank
        assert x.shape[1] * x.element_size() % 16 == 0
        self.sizes.append(num_max_tokens_per_rank)
        rank, num_ranks = self._carrier.rank, self._carrier.num_ranks
        share = num_experts // num_ranks
        owners = torch.where(topk_idx < 0, -1, topk_idx // share)
        targets = torch.stack([torch.where((owners == r).any(1), r, -1) for r in range(num_ranks)], 1)
        numbers = rank * num_max_tokens_per_rank + torch.arange(len(x)).unsqueeze(1)
        sources, ids, arrived_weights, arrived = (
            self._carrier.dispatch(rows, targets, torch.ones(targets.shape)) for rows in (numbers, topk_idx, weights, x)
        )
        local = torch.where(ids.rows // share == rank, ids.rows - rank * share, -1)
        shuffle = torch.randperm(len(local), generator=torch.Generator().manual_seed(len(x)))
        metadata = sources.rows.expand(-1, 2 + topk_idx.shape[1])[shuffle].int()
        handle = _Handle(metadata, shuffle, arrived)
        return arrived.rows[shuffle], local[shuffle], arrived_weights.rows[shuffle], handle, None

    def combine(self, x: torch.Tensor, handle: _Handle) -> tuple[torch.Tensor, None, None]:
        assert (x.dtype, x.shape[1] % 256) == (torch.bfloat16, 0)
        assert len(x) == len(handle.shuffle)
        back = self._carrier.combine(ExpertRows(x, handle.shuffle.argsort().unsqueeze(1)), handle.arrived)
        rows = torch.cat((back.values, back.values.new_zeros(1, back.values.shape[1])))
        return rows[back.places].sum(dim=1), None, None


def package() -> Any:
    """A stand-in for the module."""
    return SimpleNamespace(ElasticBuffer=ElasticBuffer, __version__="2.1.0")
