"""Groups of real processes: rendezvous, bytes of any dtype, agreement, and what a missing rank looks like."""

from __future__ import annotations

import time

import pytest
import torch
from support.processes import run_ranks

from deepinfer.distributed.expert_order import order_by_expert
from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.process_groups import ProcessGroups, open_store
from deepinfer.distributed.step_sync import GroupStepSync, StepAgreement, StepProposal
from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.errors import RankError
from deepinfer.kernels.ops import ExpertRows

NUM_EXPERTS = 7


def _rows_of(rank: int, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    rows = (20 * torch.rand(num_rows, 6, generator=generator)).to(dtype)
    expert_ids = torch.randint(-1, NUM_EXPERTS, (num_rows, 3), generator=generator)
    return rows, expert_ids, torch.rand(num_rows, 3, generator=generator)


def _experts(sent: Dispatched, first: int) -> ExpertRows:
    """Each copy times a number of its expert and its weight."""
    factors = (sent.expert_ids + first + 2) * sent.weights
    values = (sent.rows.float().unsqueeze(1) * factors.unsqueeze(2)).to(sent.rows.dtype)
    places = torch.arange(sent.expert_ids.numel()).view_as(sent.expert_ids)
    return ExpertRows(values.flatten(0, 1), torch.where(sent.expert_ids < 0, -1, places))


def _combined(returned: ExpertRows) -> torch.Tensor:
    """[T, K, D], zeros where nothing was sent."""
    return torch.cat((returned.values, returned.values.new_zeros(1, returned.values.shape[1])))[returned.places]


def _dispatch_and_combine(groups: ProcessGroups, num_rows: list[int], dtype: torch.dtype) -> dict:
    dispatcher = TorchDispatcher(groups.dispatch, NUM_EXPERTS)
    rows, expert_ids, weights = _rows_of(dispatcher.rank, num_rows[dispatcher.rank], dtype)
    sent = dispatcher.dispatch(rows, expert_ids, weights)
    first = dispatcher.rank * NUM_EXPERTS // dispatcher.num_ranks
    assert bool((sent.expert_ids >= 0).all())
    assert sent.expected_copies == len(sent.rows)
    return {
        "arrived": torch.cat((sent.expert_ids + first, sent.weights, sent.rows), 1)[
            sent.expert_ids[:, 0].argsort(stable=True)
        ],
        "combined": _combined(dispatcher.combine(_experts(sent, first), sent)),
    }


def _dispatch_worker(groups: ProcessGroups, cases: list[tuple[list[int], torch.dtype]]) -> list[dict]:
    return [_dispatch_and_combine(groups, num_rows, dtype) for num_rows, dtype in cases]


def _dispatch_cases(num_ranks: int) -> list[tuple[list[int], torch.dtype]]:
    full = [5, 3, 1, 8][:num_ranks]
    return [
        (full, torch.float32),
        (full, torch.bfloat16),
        (full, torch.uint8),
        ([0] * (num_ranks - 1) + [4], torch.bfloat16),
        ([1] + [0] * (num_ranks - 1), torch.float32),
        ([0] * num_ranks, torch.bfloat16),
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_spread_experts_give_the_rows_of_one_rank_bit_for_bit(num_ranks: int) -> None:
    cases = _dispatch_cases(num_ranks)
    results = run_ranks(_dispatch_worker, num_ranks, cases)
    for case, (num_rows, dtype) in enumerate(cases):
        parts = [_rows_of(rank, num_rows[rank], dtype) for rank in range(num_ranks)]
        rows, expert_ids, weights = (torch.cat(columns) for columns in zip(*parts, strict=True))
        local = LocalDispatcher(NUM_EXPERTS)
        whole = local.dispatch(rows, expert_ids, weights)
        combined = _combined(local.combine(_experts(whole, 0), whole))
        copies, counts = order_by_expert(expert_ids, num_experts=NUM_EXPERTS)
        copies = copies[: int(counts.sum())]
        columns = (expert_ids.view(-1, 1)[copies], weights.view(-1, 1)[copies], rows[copies // expert_ids.shape[1]])
        got = [results[rank][case] for rank in range(num_ranks)]
        assert torch.equal(torch.cat([part["arrived"] for part in got]), torch.cat(columns, 1))
        assert torch.equal(torch.cat([part["combined"] for part in got]), combined)


def _agree_worker(groups: ProcessGroups, proposals: list[list[StepProposal]]) -> list[StepAgreement]:
    sync = GroupStepSync(groups.sync)
    return [sync.agree(round_[groups.sync.rank]) for round_ in proposals]


def test_ranks_park_only_without_work_and_with_the_same_wake() -> None:
    idle = StepProposal(has_work=False, num_rows=0, wake_id=7, stopping=False)
    woken = StepProposal(has_work=False, num_rows=0, wake_id=8, stopping=False)
    busy = StepProposal(has_work=True, num_rows=3, wake_id=8, stopping=False)
    ending = StepProposal(has_work=False, num_rows=0, wake_id=7, stopping=True)
    results = run_ranks(_agree_worker, 2, [[idle, idle], [idle, woken], [idle, busy], [busy, ending]])
    expected = [
        StepAgreement(anyone_has_work=False, max_rows=0, park=True, stop=False),
        StepAgreement(anyone_has_work=False, max_rows=0, park=False, stop=False),
        StepAgreement(anyone_has_work=True, max_rows=3, park=False, stop=False),
        StepAgreement(anyone_has_work=True, max_rows=3, park=False, stop=True),
    ]
    assert results == [expected, expected]


def test_all_ranks_draft_when_one_wants_to() -> None:
    wanting, resting = (
        StepProposal(has_work=True, num_rows=3, wake_id=8, stopping=False, wants_drafts=wants)
        for wants in (True, False)
    )
    results = run_ranks(_agree_worker, 2, [[resting, resting], [resting, wanting], [wanting, wanting]])
    assert [[agreement.is_drafting for agreement in rank] for rank in results] == [[False, True, True]] * 2


def _absent_worker(groups: ProcessGroups, _: None) -> str:
    if groups.sync.rank == 1:
        time.sleep(3.0)
        return "absent"
    try:
        GroupStepSync(groups.sync).agree(StepProposal(has_work=True, num_rows=1, wake_id=1, stopping=False))
    except RankError as error:
        return str(error)
    return "no error"


def test_a_rank_that_hangs_is_an_error_with_the_rank_in_it() -> None:
    results = run_ranks(_absent_worker, 2, None, timeout_seconds=1.0)
    assert results[0].startswith("decode rank 0: the all-gather of 2 ranks failed"), results[0]


def test_ranks_that_do_not_come_are_named() -> None:
    store, port = open_store("127.0.0.1")
    with pytest.raises(
        RankError, match=r"prefill rank 1: ranks \[0, 2\] did not come to 127\.0\.0\.1:\d+ within 0\.3 s"
    ):
        _form_alone(port)
    del store


def test_a_store_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RankError, match="prefill rank 1: 3 ranks could not meet at"):
        _form_alone(1)


def _form_alone(port: int) -> None:
    ProcessGroups.form(
        role="prefill", rank=1, num_ranks=3, host="127.0.0.1", port=port, meeting_seconds=0.3, timeout_seconds=5.0
    )
