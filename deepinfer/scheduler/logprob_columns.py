"""Cutting and joining columns of log-probabilities by tokens, without decoding what stays."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.codec import unpack
from deepinfer.protocol import LogprobColumns

_ENTRY_BYTES = 4  # of an int32 id, and of a float32 value


def first_tokens(columns: LogprobColumns, num_tokens: int) -> LogprobColumns:
    """Return the columns of the first `num_tokens` tokens (all of them when there are fewer)."""
    counts = unpack(columns.counts)[:num_tokens]
    num_bytes = int(counts.sum()) * _ENTRY_BYTES
    return LogprobColumns(
        counts=counts.tobytes(), token_ids=columns.token_ids[:num_bytes], values=columns.values[:num_bytes]
    )


def join_columns(parts: Iterable[LogprobColumns]) -> LogprobColumns:
    """Return the columns of the tokens of all parts, in order."""
    parts = tuple(parts)
    return LogprobColumns(
        counts=b"".join(part.counts for part in parts),
        token_ids=b"".join(part.token_ids for part in parts),
        values=b"".join(part.values for part in parts),
    )
