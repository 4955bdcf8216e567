"""Cutting and joining packed log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.codec import pack, unpack
from deepinfer.protocol import LogprobColumns


def slice_logprobs(columns: LogprobColumns, start: int, stop: int) -> LogprobColumns:
    """Return the entries of tokens `start .. stop - 1`."""
    counts = unpack(columns.counts)
    assert 0 <= start <= stop <= len(counts), f"tokens {start} .. {stop} of {len(counts)}"
    if start == 0 and stop == len(counts):
        return columns
    first, last = 4 * int(counts[:start].sum()), 4 * int(counts[:stop].sum())
    return LogprobColumns(
        counts=pack(counts[start:stop]),
        token_ids=columns.token_ids[first:last],
        values=columns.values[first:last],
    )


def join_logprobs(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """Return the entries of all parts, one part after the other."""
    return LogprobColumns(
        counts=b"".join(part.counts for part in parts),
        token_ids=b"".join(part.token_ids for part in parts),
        values=b"".join(part.values for part in parts),
    )


def prompt_columns(parts: Sequence[LogprobColumns], num_prompt_tokens: int) -> LogprobColumns:
    """Return a prompt's entries from those of its chunks, which begin at token 1: token 0 has none.

    What the chunks hold beyond the prompt (a replay's earlier output) is left out.
    """
    token_zero = LogprobColumns(counts=pack(np.zeros(1, np.int32)))
    return slice_logprobs(join_logprobs((token_zero, *parts)), 0, num_prompt_tokens)
