"""Log-probabilities of chosen tokens and of their most likely alternatives, from the raw distribution.

A value is log-softmax of the untouched logits, computed in float64 from order-free sums and rounded once to float32,
so it doesn't depend on the batch. A value is finite, or -inf where the model's logit is -inf: JSON can't hold that,
and whoever writes JSON has to replace it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.codec import pack, pack_floats
from deepinfer.platforms.transfer import to_host
from deepinfer.protocol import LogprobColumns
from deepinfer.sampling.processors import log_normalizers

WHOLE_VOCABULARY = -1
_ELEMENTS_PER_CHUNK = 1 << 22  # bounds the temporaries of long prompts


@dataclass(slots=True, frozen=True)
class RankedTokens:
    """Of R rows: `values` float32 and `token_ids` int64 [R, 1 + limit], on the host once the copy has happened.

    A row's entries: the chosen id first, then the `limit` most likely ids by descending value, ties by ascending id
    (the chosen one again if it is among them).
    """

    values: Tensor
    token_ids: Tensor
    vocab_size: int

    def columns(self, start: int, stop: int, num_top: int) -> LogprobColumns:
        """Return the columns of the tokens of rows `start .. stop - 1`, with `num_top` alternatives each."""
        end = 1 + num_entries(num_top, self.vocab_size)
        return LogprobColumns(
            counts=pack(np.full(stop - start, end)),
            token_ids=pack(self.token_ids[start:stop, :end].numpy().flatten()),
            values=pack_floats(self.values[start:stop, :end].numpy().flatten()),
        )


def num_entries(num_top: int, vocab_size: int) -> int:
    """Return how many alternatives `num_top` asks for; -1 is the whole vocabulary."""
    return vocab_size if num_top == WHOLE_VOCABULARY else min(num_top, vocab_size)


def rank_tokens(logits: Tensor, chosen: Tensor, num_top: int) -> RankedTokens:
    """Rank the tokens of R rows: `logits` [R, V] float32, `chosen` [R] int64; `num_top` as in `num_entries`.

    Unusable rows (`sampler.unusable_rows`) give NaN: fail their request.
    """
    vocab_size = logits.shape[1]
    limit, num_rows = num_entries(num_top, vocab_size), max(1, _ELEMENTS_PER_CHUNK // vocab_size)
    chunks = [
        _ranked(part, ids, limit) for part, ids in zip(logits.split(num_rows), chosen.split(num_rows), strict=True)
    ]
    values, token_ids = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return RankedTokens(to_host(values), to_host(token_ids), vocab_size)


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
