"""Masks of allowed token ids as bits: token t is allowed when bit t % 32 of word t // 32 is 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 32


@dataclass(slots=True, frozen=True)
class RowMasks:
    """Masks of some rows of a step, the others are free. `rows` [n] int64 are different, `words` [n, W] int32."""

    rows: Tensor
    words: Tensor

    def to(self, device: torch.device) -> RowMasks:
        """Return the masks on `device`."""
        return RowMasks(self.rows.to(device), self.words.to(device))


def num_words(vocab_size: int) -> int:
    """Return W for a vocabulary."""
    return (vocab_size + WORD_BITS - 1) // WORD_BITS


def allowed_ids(words: Tensor, vocab_size: int) -> Tensor:
    """Return [n, vocab_size] bool from `words` [n, W] int32."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].to(torch.bool)


def words_of(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return [W] int32 with the bits of `token_ids` [n] (different ones) set."""
    bits = torch.zeros(num_words(vocab_size) * WORD_BITS, dtype=torch.int64)
    bits[token_ids] = 1
    weights = 1 << torch.arange(WORD_BITS, dtype=torch.int64)
    words = (bits.view(-1, WORD_BITS) * weights).sum(dim=1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
