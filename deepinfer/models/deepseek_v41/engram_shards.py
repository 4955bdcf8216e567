"""Look-ups in n-gram tables that are spread over the devices of a group: row numbers go out, rows come back."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.distributed.expert_order import first_expert
from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.ops import ExpertRows
from deepinfer.models.deepseek_v41.weight_types import EngramTable


def rows_of_share(num_rows: int, index: int, num_shares: int) -> tuple[int, int]:
    """Return the half-open run of table rows of a share; all runs but the last ones have equal length."""
    assert 0 <= index < num_shares, (index, num_shares)
    length = _share_length(num_rows, num_shares)
    return min(index * length, num_rows), min((index + 1) * length, num_rows)


def fetch_rows(
    rows: Tensor, table: EngramTable, dispatcher: TokenDispatcher, *, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Return the table's rows `rows` [N] int64 as stored: codes float8_e4m3fn [N, width], scale bytes [N, width / 32].

    A collective of all ranks of `dispatcher`, which serves `num_experts` experts and of which rank r holds share r: a
    row's number travels like a token for the first expert of the rank that holds the row.
    """
    owners = rows // _share_length(table.num_rows, dispatcher.num_ranks)
    targets = first_expert(owners, num_ranks=dispatcher.num_ranks, num_experts=num_experts)
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=rows.device)
    asked = dispatcher.dispatch(rows.unsqueeze(1), targets.unsqueeze(1), ones)
    # a place where nothing arrived may hold any number
    places = torch.where(asked.expert_ids.flatten() < 0, 0, asked.rows.flatten() - table.first_row)
    # gathered as bytes: indexing has no FP8 kernel everywhere
    found = torch.cat([table.weight.view(torch.uint8)[places], table.scale[places]], dim=1)
    numbers = torch.arange(len(found), device=found.device).view_as(asked.expert_ids)
    returned = dispatcher.combine(ExpertRows(found, numbers), asked)
    answers = returned.values[returned.places.flatten()]
    width = table.weight.shape[1]
    return answers[:, :width].contiguous().view(torch.float8_e4m3fn), answers[:, width:].contiguous()


def _share_length(num_rows: int, num_shares: int) -> int:
    return -(-num_rows // num_shares)
