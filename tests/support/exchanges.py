"""Exchanges with experts that need no weights: what is sent, what the experts answer, what has to come back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.distributed.token_dispatcher import Dispatched, TokenDispatcher
from deepinfer.kernels.ops import ExpertRows

EXPERTS = 7
WIDTH = 12
COLUMNS = 3


@dataclass(frozen=True)
class Exchange:
    """What one rank gives to `dispatch`."""

    rows: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor

    def expected(self) -> torch.Tensor:
        """[T, K, D]: expert e answers row * (e + 2) * weight; zeros where there is no expert."""
        factors = (self.expert_ids + 2) * self.weights
        answers = (self.rows.float().unsqueeze(1) * factors.unsqueeze(2)).to(self.rows.dtype)
        return answers.masked_fill((self.expert_ids < 0).unsqueeze(2), 0)

    def to(self, device: torch.device) -> Exchange:
        """The same on a device."""
        return Exchange(self.rows.to(device), self.expert_ids.to(device), self.weights.to(device))


def exchange_of(
    seed: int,
    num_rows: int,
    *,
    width: int = WIDTH,
    columns: int = COLUMNS,
    num_experts: int = EXPERTS,
    favourite: int | None = None,
) -> Exchange:
    """A random exchange; one id in num_experts + 1 is -1. With `favourite` all rows go to that expert too."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width, generator=generator).bfloat16()
    expert_ids = torch.randint(-1, num_experts, (num_rows, columns), generator=generator)
    if favourite is not None:
        expert_ids[:, 0] = favourite
    return Exchange(rows, expert_ids, torch.rand(num_rows, columns, generator=generator))


def answers_of(arrived: Dispatched, first: int) -> ExpertRows:
    """What the experts of a rank, of which the first one is `first`, make of what has arrived."""
    factors = (arrived.expert_ids + first + 2) * arrived.weights
    answers = (arrived.rows.float().unsqueeze(1) * factors.unsqueeze(2)).to(arrived.rows.dtype)
    numbers = torch.arange(factors.numel(), device=factors.device).view_as(arrived.expert_ids)
    return ExpertRows(answers.flatten(0, 1), torch.where(arrived.expert_ids < 0, -1, numbers))


def combined(returned: ExpertRows) -> torch.Tensor:
    """[T, K, D], zeros where nothing was sent."""
    values = torch.cat((returned.values, returned.values.new_zeros(1, returned.values.shape[1])))
    return values[returned.places]


def returns_bytes(
    dispatcher: TokenDispatcher,
    num_rows: int,
    *,
    width: int,
    answer_width: int,
    columns: int,
    num_experts: int,
    device: str = "cpu",
) -> bool:
    """Rows of `width` bytes go out, shorter than answers are; each answer is the first bytes of the row as bf16."""
    numbers = torch.arange(num_rows * width, device=device).view(num_rows, width)
    rows = (numbers * 5 + numbers // 256 + dispatcher.rank).to(torch.uint8)
    expert_ids = torch.arange(columns * num_rows, device=device).view(num_rows, columns) % num_experts
    arrived = dispatcher.dispatch(rows, expert_ids, torch.ones(num_rows, columns, device=device))
    places = torch.arange(arrived.expert_ids.numel(), device=device).view_as(arrived.expert_ids)
    copies = arrived.expert_ids.shape[1]
    answers = arrived.rows[:, :answer_width].bfloat16().repeat_interleave(copies, 0)
    returned = combined(dispatcher.combine(ExpertRows(answers, places), arrived))
    return torch.equal(returned, rows[:, :answer_width].bfloat16().unsqueeze(1).expand(-1, columns, -1))


def arrivals(sent: Dispatched) -> torch.Tensor:
    """What each local expert of a rank is given, expert by expert in its order: (expert, weight, row), on the host."""
    return _by_expert(sent.rows, sent.expert_ids, sent.weights)


def expected_arrivals(exchanges: list[Exchange], rank: int) -> torch.Tensor:
    """The same from what all ranks give to `dispatch`: in the order (expert, source rank, row, column)."""
    first, end = (number * EXPERTS // len(exchanges) for number in (rank, rank + 1))
    rows, ids, weights = (
        torch.cat([getattr(exchange, name) for exchange in exchanges]) for name in ("rows", "expert_ids", "weights")
    )
    return _by_expert(rows, torch.where((ids >= first) & (ids < end), ids - first, -1), weights)


def _by_expert(rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    experts = expert_ids.flatten()
    copies = (experts >= 0).nonzero().flatten()
    copies = copies[experts[copies].argsort(stable=True)]
    columns = (
        experts[copies].unsqueeze(1),
        weights.flatten()[copies].unsqueeze(1),
        rows[copies // expert_ids.shape[1]],
    )
    return torch.cat([column.double() for column in columns], 1).cpu()
