"""The single-rank dispatcher: order of rows, rows that go nowhere, and the way back."""

from __future__ import annotations

import torch

from deepinfer.distributed.local_dispatcher import LocalDispatcher


def test_rows_are_ordered_by_expert_then_row_then_column() -> None:
    rows = torch.tensor([[10.0], [20.0], [30.0]])
    expert_ids = torch.tensor([[2, 0], [-1, 2], [0, -1]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    dispatched = LocalDispatcher(4).dispatch(rows, expert_ids, weights)
    assert dispatched.tokens_per_expert.tolist() == [2, 0, 2, 0]
    assert len(dispatched.rows) == len(dispatched.weights) == 6  # as many whatever the ids are
    assert dispatched.rows[:4].flatten().tolist() == [10.0, 30.0, 10.0, 20.0]
    assert torch.equal(dispatched.weights[:4], torch.tensor([0.2, 0.5, 0.1, 0.4]))


def test_rows_return_to_their_token_and_column_and_the_rest_is_zero() -> None:
    rows = torch.tensor([[10.0], [20.0], [30.0]])
    expert_ids = torch.tensor([[2, 0], [-1, 2], [-1, -1]])
    dispatcher = LocalDispatcher(4)
    dispatched = dispatcher.dispatch(rows, expert_ids, torch.ones(3, 2))
    nobody = torch.full((3, 1), torch.nan)
    combined = dispatcher.combine(torch.cat((torch.tensor([[1.0], [2.0], [3.0]]), nobody)), dispatched)
    assert combined.flatten().tolist() == [2.0, 1.0, 0.0, 3.0, 0.0, 0.0]


def test_no_rows_at_all() -> None:
    dispatcher = LocalDispatcher(4)
    dispatched = dispatcher.dispatch(torch.zeros(0, 5), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert dispatched.tokens_per_expert.tolist() == [0, 0, 0, 0]
    assert dispatcher.combine(torch.zeros(0, 5), dispatched).shape == (0, 2, 5)
