"""Masks of allowed token ids as bits: token t is allowed when bit t % 32 of word t // 32 is 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.platforms.transfer import to_device

WORD_BITS = 32


@dataclass(slots=True, frozen=True)
class StepMasks:
    """Masks for the slots of a step that have a grammar; every other slot is free.

    `words` [n, 1 + K, W] int32: entry (i, j) is the mask of the token at position `positions[i] + j` of `slots[i]`, for
    the row behind j drafts. `slots`, `positions` [n] int64.
    """

    slots: Tensor
    positions: Tensor
    words: Tensor

    def to(self, device: torch.device) -> StepMasks:
        """Return the masks on `device`."""
        parts = (to_device(part, device) for part in (self.slots, self.positions, self.words))
        return StepMasks(*parts)


def mask_scores(scores: Tensor, masks: StepMasks, *, slots: Tensor, positions: Tensor) -> None:
    """Set `scores` [R, V] of ids that are not allowed to -inf; row r chooses the token at `positions[r]` of `slots[r]`.

    A row of a slot with a grammar for which there is no mask is left without any id: it fails, it is never free.
    """
    belongs = slots[:, None] == masks.slots
    owners = belongs.to(torch.int64).argmax(dim=1)
    places = positions - masks.positions[owners]
    width = masks.words.shape[1]
    has_mask = belongs.any(dim=1) & (places >= 0) & (places < width)
    allowed = allowed_ids(masks.words.flatten(0, 1), scores.shape[1])[owners * width + places.clamp(0, width - 1)]
    allowed &= has_mask[:, None]
    scores.masked_fill_(belongs.any(dim=1)[:, None] & ~allowed, -math.inf)


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
