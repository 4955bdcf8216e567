"""All-to-all between ranks in plain torch: for development, and as the oracle of faster dispatchers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.distributed.expert_order import first_expert, order_by_expert
from deepinfer.distributed.process_groups import Group
from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.kernels.ops import ExpertRows

_WEIGHT_BYTES = 4


@dataclass(slots=True, frozen=True)
class _Route:
    """How one dispatch went, for the way back: `copies` [n], flat numbers of the sent ones among `shape` (T, K)."""

    copies: torch.Tensor
    shape: torch.Size
    send: list[int]
    receive: list[int]


class TorchDispatcher:
    """See `token_dispatcher.TokenDispatcher`. Equal to `LocalDispatcher` bit for bit, for any number of ranks.

    Three collectives a layer: row counts, rows with their weights as bytes, and the experts' rows back. Every rank
    takes part in each, also with no row to send or to receive.
    """

    batch_invariant = True
    capturable = False

    def __init__(self, group: Group, num_experts: int) -> None:
        """Spread `num_experts` logical experts over the ranks of `group`; only the device thread uses it."""
        assert num_experts >= group.num_ranks, f"{num_experts} experts on {group.num_ranks} ranks"
        self.rank = group.rank
        self.num_ranks = group.num_ranks
        self._group = group
        self._num_experts = num_experts
        self._starts = [
            first_expert(rank, num_ranks=group.num_ranks, num_experts=num_experts)
            for rank in range(group.num_ranks + 1)
        ]

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Send each row to the ranks of its experts."""
        copies, counts = order_by_expert(expert_ids, num_experts=self._num_experts)
        arriving = self._exchange_counts(counts)
        send = [int(part.sum()) for part in counts.split(self._sizes())]
        receive = [int(total) for total in arriving.sum(dim=1)]
        copies = copies[: sum(send)]
        payload = _join(rows[copies // expert_ids.shape[1]], weights.flatten()[copies])
        arrived = self._group.all_to_all(payload, send=send, receive=receive)
        arrived_rows, arrived_weights = _split(arrived, rows)
        return Dispatched(
            rows=arrived_rows,
            expert_ids=_local_experts(arriving).unsqueeze(1),
            weights=arrived_weights.unsqueeze(1),
            expected_copies=len(arrived_rows),
            handle=_Route(copies, expert_ids.shape, send, receive),
        )

    def combine(self, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        """Send the experts' rows back to the ranks of their tokens."""
        route: _Route = dispatched.handle
        answers = expert_rows.values[expert_rows.places.flatten()]
        returned = self._group.all_to_all(answers, send=route.receive, receive=route.send)
        places = torch.full(route.shape, -1, device=returned.device).flatten()
        places[route.copies] = torch.arange(len(returned), device=returned.device)
        return ExpertRows(returned, places.view(route.shape))

    def _sizes(self) -> list[int]:
        return [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)]

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return [num_ranks, E_local]: how many rows each source rank sends to each expert of this rank."""
        own = self._sizes()[self.rank]
        arriving = self._group.all_to_all(counts, send=self._sizes(), receive=[own] * self.num_ranks)
        return arriving.view(self.num_ranks, own)


def _local_experts(arriving: torch.Tensor) -> torch.Tensor:
    """Return the local expert of each arrival, which come by (source, expert), from counts [num_ranks, E_local]."""
    experts = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    return experts.repeat_interleave(arriving.flatten())


def _join(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [N, D * itemsize + 4] uint8: the bytes of each row and, behind them, its float32 weight."""
    row_bytes = rows.contiguous().view(torch.uint8).view(len(rows), rows.shape[1] * rows.element_size())
    weight_bytes = weights.to(torch.float32).contiguous().view(torch.uint8).view(len(rows), _WEIGHT_BYTES)
    return torch.cat([row_bytes, weight_bytes], dim=1)


def _split(payload: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows [N, D] in the dtype of `like`, weights [N] float32) from the bytes that `_join` wrote."""
    # Not `contiguous`: it leaves a slice of one row or none as it is, whose stride the wider types refuse.
    row_bytes = payload[:, :-_WEIGHT_BYTES].clone(memory_format=torch.contiguous_format)
    weight_bytes = payload[:, -_WEIGHT_BYTES:].clone(memory_format=torch.contiguous_format)
    rows = row_bytes.view(like.dtype).view(len(payload), like.shape[1])
    return rows, weight_bytes.view(torch.float32).view(len(payload))
