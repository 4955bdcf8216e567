"""Log-probabilities: values, order, ties, and that only the raw logits matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.codec import unpack, unpack_floats
from deepinfer.protocol import LogprobColumns
from deepinfer.sampling.logprobs import rank_tokens
from tests.sampling.sampling_case import Batch, columns_of


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: list[int]) -> list[LogprobColumns]:
    """The columns of each row, with as many alternatives as it asks for, from one ranking of all."""
    ranked = rank_tokens(logits, chosen, -1 if -1 in num_top else max(num_top))
    return [ranked.columns(row, row + 1, count) for row, count in enumerate(num_top)]


def prompt_logprobs(logits: Tensor, next_ids: Tensor, num_top: int) -> LogprobColumns:
    """The columns of all rows."""
    return rank_tokens(logits, next_ids, num_top).columns(0, len(logits), num_top)


def _entries(columns: LogprobColumns) -> list[list[tuple[int, float]]]:
    """One list of (id, value) for each token."""
    ids, values = unpack(columns.token_ids).tolist(), unpack_floats(columns.values).tolist()
    pairs = list(zip(ids, values, strict=True))
    ends = np.cumsum(unpack(columns.counts)).tolist()
    return [pairs[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _ids(columns: LogprobColumns) -> list[list[int]]:
    return [[token_id for token_id, _ in token] for token in _entries(columns)]


def test_values_are_log_softmax() -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 5
    columns = token_logprobs(logits, torch.arange(5), [-1] * 5)
    expected = torch.log_softmax(logits.double(), dim=1)
    for row, column in enumerate(columns):
        (entries,) = _entries(column)
        assert len(entries) == 701
        for token_id, value in entries:
            assert value == pytest.approx(float(expected[row, token_id]), abs=2e-6)


def test_the_chosen_token_comes_first_then_ties_by_ascending_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, -5.0]])
    (columns,) = token_logprobs(logits, torch.tensor([4]), [4])
    assert _ids(columns) == [[4, 1, 3, 2, 4]]


def test_negative_and_zero_logits_are_ordered_like_numbers() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -math.inf, -2.0, 1e-40]])
    (columns,) = token_logprobs(logits, torch.tensor([0]), [-1])
    assert _ids(columns) == [[0, 5, 0, 1, 2, 4, 3]]
    assert _entries(columns)[0][-1] == (3, -math.inf)


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    logits = torch.arange(12.0).reshape(3, 4)
    columns = token_logprobs(logits, torch.tensor([0, 1, 2]), [0, 2, 99])
    assert [_ids(column) for column in columns] == [[[0]], [[1, 3, 2]], [[2, 3, 2, 1, 0]]]


def test_prompt_logprobs_hold_every_token() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    next_ids = torch.arange(9)
    columns = prompt_logprobs(logits, next_ids, 3)
    rows = token_logprobs(logits, next_ids, [3] * 9)
    assert _entries(columns) == [entries for row in rows for entries in _entries(row)]
    assert unpack(prompt_logprobs(logits, next_ids, -1).counts).tolist() == [51] * 9
    assert _ids(prompt_logprobs(logits, next_ids, 0)) == [[token_id] for token_id in range(9)]
    assert prompt_logprobs(logits[:0], next_ids[:0], 3) == LogprobColumns()


def test_long_prompts_go_in_pieces_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    whole = prompt_logprobs(logits, torch.arange(9), 5)
    monkeypatch.setattr("deepinfer.sampling.logprobs._ELEMENTS_PER_CHUNK", 100)
    assert prompt_logprobs(logits, torch.arange(9), 5) == whole


def test_sampling_reports_the_raw_distribution_of_rows_that_asked() -> None:
    batch = Batch(vocab_size=4)
    batch.admit(1, temperature=0.3, logit_bias={3: -100.0}, logprobs=2)
    batch.admit(2, temperature=0.0)
    batch.admit(3, temperature=0.0, logprobs=0)
    logits = torch.tensor([0.0, 1.0, 2.0, 9.0]).repeat(3, 1)
    sampled = batch.sample(logits, [1, 2, 3], [1, 1, 1])
    first, second, third = columns_of(sampled)
    assert second is None
    assert first is not None
    assert third is not None
    assert _ids(first) == [[int(sampled.token_ids[0]), 3, 2]]
    assert int(sampled.token_ids[0]) != 3
    assert _ids(third) == [[3]]
    assert _entries(third)[0][0][1] == pytest.approx(float(torch.log_softmax(logits[0], 0)[3]), abs=1e-6)
