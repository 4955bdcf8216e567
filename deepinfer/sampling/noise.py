"""Which random number decides what: the purpose of noise, and the seeds of a request's samples.

A kind of decision that must be independent of the token draw at the same position takes a purpose of its own; two that
share words correlate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.sampling import philox

TOKEN_PURPOSE = 0  # a token, and under shared noise its draft
ACCEPTANCE_PURPOSE = 2  # the coin of a draft
RESIDUAL_PURPOSE = 3  # the token in place of a rejected draft
# + k: draft k of a pass, where drafts must be independent of tokens. A position is drafted again, from a later anchor,
# when drafts before it were rejected: with a purpose for each k its noise is new then, and what was learned from the
# earlier draft (confidences that choose a budget) says nothing about it.
DRAFT_PURPOSE = 16
_SAMPLE_SEED_WORD = 0x5EED
_WORD = 0xFFFFFFFF
_SEED_MASK = 2**63 - 1


def derived_seeds(seeds: Tensor, samples: Tensor) -> Tensor:
    """Return the seeds [R] int64 of sample numbers `samples` [R] of requests with `seeds` [R] (both int64).

    Equal to `scheduler.sampling_params.derived_seed` for each pair; sample 0 keeps the request's seed.
    """
    zeros = torch.zeros_like(samples)
    counter = (samples, torch.full_like(samples, _SAMPLE_SEED_WORD), zeros, zeros)
    low, high, _, _ = philox(counter, (seeds & _WORD, seeds >> 32))
    return torch.where(samples == 0, seeds, (low | high << 32) & _SEED_MASK)
