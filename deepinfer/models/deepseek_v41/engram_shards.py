"""Look-ups in n-gram tables that are spread over the devices of a group: row numbers go out, rows come back."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.distributed.expert_order import first_expert
from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.ops import ExpertRows
from deepinfer.models.deepseek_v41.config import QUANT_BLOCK
from deepinfer.models.deepseek_v41.weight_types import EngramTable

_WORD_BYTES = 4  # of which an `ExchangeShape` has whole ones


def rows_of_share(num_rows: int, index: int, num_shares: int) -> tuple[int, int]:
    """Return the half-open run of table rows of a share; all runs but the last ones have equal length."""
    assert 0 <= index < num_shares, (index, num_shares)
    length = _share_length(num_rows, num_shares)
    return min(index * length, num_rows), min((index + 1) * length, num_rows)


def answer_bytes(width: int) -> int:
    """Return the bytes with which a table row of `width` columns travels: codes and scales, up to a whole word."""
    return -(-(width + width // QUANT_BLOCK) // _WORD_BYTES) * _WORD_BYTES


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
    parts = [table.weight.view(torch.uint8)[places], table.scale[places]]
    width, num_scales = (part.shape[1] for part in parts)
    parts.append(parts[0].new_zeros(len(places), answer_bytes(width) - width - num_scales))
    found = torch.cat(parts, dim=1)
    numbers = torch.arange(len(found), device=found.device).view_as(asked.expert_ids)
    returned = dispatcher.combine(ExpertRows(found, numbers), asked)
    answers = returned.values[returned.places.flatten()]
    codes, scale, _ = answers.split([width, num_scales, answers.shape[1] - width - num_scales], dim=1)
    return codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous()


def _share_length(num_rows: int, num_shares: int) -> int:
    return -(-num_rows // num_shares)
