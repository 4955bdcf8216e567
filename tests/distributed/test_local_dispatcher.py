"""The single-rank dispatcher: rows stay where they are."""

from __future__ import annotations

import pytest
import torch

from deepinfer.distributed.expert_order import order_by_expert
from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.kernels.ops import ExpertRows


def test_rows_stay_and_their_answers_come_back() -> None:
    rows, expert_ids, weights = torch.rand(3, 5), torch.tensor([[2, 0], [-1, 2], [0, -1]]), torch.rand(3, 2)
    dispatcher = LocalDispatcher(4)
    sent = dispatcher.dispatch(rows, expert_ids, weights)
    assert (sent.rows is rows, sent.expert_ids is expert_ids, sent.weights is weights) == (True, True, True)
    assert sent.expected_copies == 6
    answers = ExpertRows(torch.rand(7, 5), torch.tensor([[6, 0], [-1, 3], [2, -1]]))
    assert dispatcher.combine(answers, sent) is answers
    with pytest.raises(AssertionError):
        dispatcher.combine(ExpertRows(answers.values, answers.places[:2]), sent)


def test_copies_are_ordered_by_expert_then_row_then_column() -> None:
    copies, counts = order_by_expert(torch.tensor([[2, 0], [-1, 2], [0, -1]]), num_experts=4)
    assert counts.tolist() == [2, 0, 2, 0]
    assert copies.tolist() == [1, 4, 0, 3, 2, 5]  # those that go to nobody last


def test_no_copies_at_all() -> None:
    copies, counts = order_by_expert(torch.zeros(0, 2, dtype=torch.int64), num_experts=4)
    assert (copies.tolist(), counts.tolist()) == ([], [0, 0, 0, 0])
