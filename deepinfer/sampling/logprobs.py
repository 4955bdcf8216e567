"""Log-probabilities of chosen tokens and of their most likely alternatives, from the raw distribution.

A value is log-softmax of the untouched logits, computed in float64 from order-free sums and rounded once to float32,
so it doesn't depend on the batch. A value is finite, or -inf where the model's logit is -inf: JSON can't hold that,
and whoever writes JSON has to replace it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.codec import pack, pack_floats
from deepinfer.protocol import LogprobColumns
from deepinfer.sampling.processors import log_normalizers

WHOLE_VOCABULARY = -1
_ELEMENTS_PER_CHUNK = 1 << 22  # bounds the temporaries of long prompts


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: list[int]) -> list[LogprobColumns]:
    """Return one token's columns for each row of `logits` [R, V] float32 (no NaN, no +inf, not all -inf).

    Entries: `chosen[r]` [R] int64 first, then the `num_top[r]` most likely ids by descending value, ties by ascending
    id (the chosen one again if it is among them); -1 is the whole vocabulary.
    """
    vocab_size = logits.shape[1]
    limits = [vocab_size if count == WHOLE_VOCABULARY else min(count, vocab_size) for count in num_top]
    values, token_ids = _ranked(logits, chosen, max(limits, default=0))
    return [
        LogprobColumns(counts=pack([limit + 1]), token_ids=pack(ids[: limit + 1]), values=pack_floats(row[: limit + 1]))
        for limit, ids, row in zip(limits, token_ids.cpu().numpy(), values.cpu().numpy(), strict=True)
    ]


def prompt_logprobs(logits: Tensor, next_ids: Tensor, num_top: int) -> LogprobColumns:
    """Return the columns of T prompt tokens: `next_ids` [T] int64 are the tokens that follow the rows of `logits`.

    `logits` [T, V] float32; unusable rows (`sampler.unusable_rows`) give NaN: fail their request. Entries as in
    `token_logprobs`, `num_top` for every token.
    """
    num_tokens, vocab_size = logits.shape
    limit = vocab_size if num_top == WHOLE_VOCABULARY else min(num_top, vocab_size)
    num_rows = max(1, _ELEMENTS_PER_CHUNK // vocab_size)
    chunks = [
        _ranked(rows, ids, limit) for rows, ids in zip(logits.split(num_rows), next_ids.split(num_rows), strict=True)
    ]
    return LogprobColumns(
        counts=pack(np.full(num_tokens, limit + 1)),
        token_ids=b"".join(pack(ids.flatten().cpu().numpy()) for _, ids in chunks),
        values=b"".join(pack_floats(values.flatten().cpu().numpy()) for values, _ in chunks),
    )


def _ranked(logits: Tensor, chosen: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return values float32 and ids int64 [R, 1 + limit]: the chosen id, then the `limit` most likely ones."""
    ids = torch.cat([chosen[:, None], _most_likely(logits, limit)], dim=1)
    values = logits.gather(1, ids).to(torch.float64) - log_normalizers(logits)[:, None]
    return values.to(torch.float32), ids


def _most_likely(logits: Tensor, limit: int) -> Tensor:
    """Return the ids [R, limit] of the largest logits, by descending value, ties by ascending id.

    Value and id make one integer key: the bits of a float, flipped below zero, order like the float itself; the id,
    counted down, breaks ties. A library top-k alone may break ties as it likes.
    """
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    vocab_size = logits.shape[1]
    countdown = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = torch.topk(ordered << 32 | countdown, limit, dim=1).values
    return vocab_size - 1 - (keys & 0xFFFFFFFF)
