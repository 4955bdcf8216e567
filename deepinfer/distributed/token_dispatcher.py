"""Carry token rows to the ranks that hold their experts, and the experts' rows back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepinfer.kernels.ops import ExpertRows


@dataclass(slots=True, frozen=True)
class Dispatched:
    """Rows that arrived at this rank, those of one expert in the order (source rank, source row, source column).

    `rows` [R, ...] as sent; `expert_ids` [R, C] int64: the local experts of its copies, -1 = none; `weights` [R, C]
    float32. `expected_copies`: how many copies go to an expert here when all experts of the group get equally many; in
    truth it may be any number. `handle` belongs to the dispatcher and goes back to `combine`.
    """

    rows: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    expected_copies: int
    handle: Any


@dataclass(slots=True, frozen=True)
class ExchangeShape:
    """An exchange that buffers are made for: at most `max_rows` rows a rank, of at most `row_bytes`, each to `columns`
    experts.

    An expert's answer to a copy has `answer_bytes`. Both are whole words of 4 bytes.
    """

    columns: int
    row_bytes: int
    answer_bytes: int
    max_rows: int


class TokenDispatcher(Protocol):
    """A collective of all ranks of an expert-parallel group: each `dispatch` needs its `combine` on every rank.

    Rank r of R holds the logical experts `r * E // R .. (r + 1) * E // R - 1`. `batch_invariant`: the rows that come
    back to a token do not depend on which other tokens were sent. `capturable`: nothing waits for the device or has a
    shape that depends on it, so that a graph may hold it.
    """

    rank: int
    num_ranks: int
    batch_invariant: bool
    capturable: bool

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Send `rows` [T, ...] of any dtype to the experts `expert_ids` [T, K] int64 with `weights` [T, K] float32.

        An id of -1 sends nothing (padding rows). T may differ between ranks and may be 0.
        """
        ...

    def combine(self, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        """Return the experts' rows to their tokens: copies [R, C] of `dispatched.rows` become those of own rows [T, K].

        Nothing is summed here: the token's own rank adds in ascending logical expert id, which keeps the bits
        independent of placement.
        """
        ...
