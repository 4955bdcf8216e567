"""A rank that stands for a group: how many rows its experts get, and what comes back to each token."""

from __future__ import annotations

import pytest
import torch

from deepinfer.distributed.loopback_dispatcher import LoopbackDispatcher, deal
from deepinfer.kernels.ops import ExpertRows


def chosen(num_rows: int, num_columns: int, num_experts: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(num_experts, generator=draw)[:num_columns] for _ in range(num_rows)])


def counts(expert_ids: torch.Tensor, num_experts: int) -> list[int]:
    return torch.bincount(expert_ids[expert_ids >= 0], minlength=num_experts).tolist()


def test_local_experts_get_equal_shares_whatever_was_chosen() -> None:
    dispatcher = LoopbackDispatcher(384, rank=5, num_ranks=64)
    assert dispatcher.num_local == 6
    sent = dispatcher.dispatch(torch.randn(20, 8), chosen(20, 6, 384), torch.rand(20, 6))
    assert counts(sent.expert_ids, 6) == [20] * 6


def test_a_skew_is_kept_to_and_the_number_of_rows_stays() -> None:
    dispatcher = LoopbackDispatcher(8, rank=1, num_ranks=4, shares=(30.0, 10.0))
    sent = dispatcher.dispatch(torch.randn(16, 4), chosen(16, 2, 8), torch.rand(16, 2))
    assert counts(sent.expert_ids, 2) == [24, 8]


def test_an_expert_without_a_share_gets_nothing() -> None:
    dispatcher = LoopbackDispatcher(12, rank=1, num_ranks=4, shares=(3.0, 0.0, 1.0))
    sent = dispatcher.dispatch(torch.randn(16, 4), chosen(16, 2, 12), torch.rand(16, 2))
    assert counts(sent.expert_ids, 3) == [24, 0, 8]


def test_padding_rows_are_sent_to_nobody() -> None:
    dispatcher = LoopbackDispatcher(8, rank=0, num_ranks=4)
    expert_ids = chosen(6, 2, 8)
    expert_ids[4:] = -1
    sent = dispatcher.dispatch(torch.ones(6, 4), expert_ids, torch.rand(6, 2))
    assert counts(sent.expert_ids, 2) == [4, 4]
    assert torch.equal(sent.expert_ids < 0, expert_ids < 0)


def test_each_copy_returns_to_its_token() -> None:
    dispatcher = LoopbackDispatcher(12, rank=0, num_ranks=4)
    rows, weights = torch.rand(10, 1), torch.rand(10, 3)
    sent = dispatcher.dispatch(rows, chosen(10, 3, 12), weights)
    assert (sent.rows is rows, sent.weights is weights) == (True, True)
    answers = ExpertRows(torch.rand(30, 1), torch.arange(30).view(10, 3))
    assert dispatcher.combine(answers, sent) is answers


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
def test_the_beginning_of_a_larger_deal_is_the_smaller_deal(shares: tuple[float, ...]) -> None:
    large = deal(64, shares)
    assert torch.equal(deal(16, shares), large[:16])
    wanted = torch.tensor(shares) * (64 / sum(shares))
    assert ((torch.bincount(large, minlength=3) - wanted).abs() <= 1).all()
