"""Rows for the sampler without a slot table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.protocol import SamplingParams
from deepinfer.sampling.rows import TokenRows
from deepinfer.sampling.state import SamplingState, draw_column_arrays


def admit(state: SamplingState, slot: int, params: SamplingParams, **options: Any) -> None:
    """Admit a sequence and write its columns, as a slot table does."""
    columns = draw_column_arrays([state.admit(slot, params, **options)])
    state.write(torch.tensor([slot]), {name: torch.from_numpy(column) for name, column in columns.items()})


def rows_of(slots: Sequence[int], seeds: Sequence[int], positions: Sequence[int], token_table: Tensor) -> TokenRows:
    """Rows that each have an owner of their own."""
    return TokenRows(
        slots=torch.tensor(slots),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        token_table=token_table,
        owners=tuple(slots),
        by_owner=torch.arange(len(slots))[:, None],
        max_position=max(positions),
    )
