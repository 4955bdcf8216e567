"""Tables that are spread over ranks give the rows of a whole table, bit for bit, on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.processes import run_ranks

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.kernels.ops import ExpertRows
from deepinfer.kernels.registry import select_kernels
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.engram_shards import answer_bytes, fetch_rows, rows_of_share
from deepinfer.models.deepseek_v41.weight_types import EngramTable

NUM_ROWS, WIDTH, NUM_EXPERTS = 1001, 64, 7
NUM_TOKENS = (5, 0, 1, 3)


def _table() -> EngramTable:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 126, (NUM_ROWS, WIDTH), generator=generator, dtype=torch.uint8)
    scale = torch.randint(110, 130, (NUM_ROWS, WIDTH // 32), generator=generator, dtype=torch.uint8)
    return EngramTable(codes.view(torch.float8_e4m3fn), scale, 0, NUM_ROWS)


def _rows(rank: int) -> torch.Tensor:
    rows = torch.randint(0, NUM_ROWS, (NUM_TOKENS[rank], 6), generator=torch.Generator().manual_seed(rank))
    if len(rows):
        rows[0, :2] = torch.tensor([0, NUM_ROWS - 1])
    return rows


def _look_up(table: EngramTable, rows: torch.Tensor, dispatcher: TorchDispatcher | None) -> torch.Tensor:
    kernels = select_kernels("cpu", numerics="reference", batch_invariant=True, overrides={})
    memory = SimpleNamespace(table=table, kernels=kernels, num_experts=NUM_EXPERTS)
    return Engram.look_up(memory, rows, dispatcher)


def _worker(groups: ProcessGroups, _: None) -> torch.Tensor:
    dispatcher = TorchDispatcher(groups.dispatch, NUM_EXPERTS)
    whole = _table()
    first, end = rows_of_share(NUM_ROWS, dispatcher.rank, dispatcher.num_ranks)
    share = EngramTable(
        whole.weight.view(torch.uint8)[first:end].view(torch.float8_e4m3fn), whole.scale[first:end], first, NUM_ROWS
    )
    return _look_up(share, _rows(dispatcher.rank), dispatcher)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_spread_tables_give_the_rows_of_the_whole_table(num_ranks: int) -> None:
    """Also on a rank without tokens, and for the first and the last row."""
    for rank, found in enumerate(run_ranks(_worker, num_ranks, None)):
        assert torch.equal(found, _look_up(_table(), _rows(rank), None)), rank


@pytest.mark.parametrize("width", [32, 64, 256])
def test_rows_travel_as_whole_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales of 32 columns are 33 bytes, which the exchange between GPUs can't carry."""
    sent: list[int] = []
    combine = LocalDispatcher.combine

    def noted(dispatcher: LocalDispatcher, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        sent.append(expert_rows.values.shape[1] * expert_rows.values.element_size())
        return combine(dispatcher, expert_rows, dispatched)

    monkeypatch.setattr(LocalDispatcher, "combine", noted)
    codes = torch.randint(0, 126, (50, width), dtype=torch.uint8)
    scale = torch.randint(110, 130, (50, width // 32), dtype=torch.uint8)
    rows = torch.tensor([49, 0, 7])
    table = EngramTable(codes.view(torch.float8_e4m3fn), scale, 0, 50)
    found_codes, found_scale = fetch_rows(rows, table, LocalDispatcher(NUM_EXPERTS), num_experts=NUM_EXPERTS)
    assert torch.equal(found_codes.view(torch.uint8), codes[rows])
    assert torch.equal(found_scale, scale[rows])
    assert sent == [answer_bytes(width)]
    assert sent[0] % 4 == 0
