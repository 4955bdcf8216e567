"""Which random number decides what: the purposes of noise, and the seeds of a request's samples."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from deepinfer.kernels.reference.sampling import philox

_SAMPLE_SEED_WORD = 0x5EED
_WORD = 0xFFFFFFFF
_SEED_MASK = 2**63 - 1


class Purpose(enum.IntEnum):
    """Independent streams of noise at one position; two decisions never share words, or they would correlate.

    Under shared-noise verification a draft uses `TOKEN` too, on purpose: it guesses the target's very draw.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def derived_seeds(seeds: Tensor, samples: Tensor) -> Tensor:
    """Return the seeds [R] int64 of sample numbers `samples` [R] of requests with `seeds` [R] (both int64).

    Equal to `scheduler.sampling_params.derived_seed` for each pair; sample 0 keeps the request's seed.
    """
    zeros = torch.zeros_like(samples)
    counter = (samples, torch.full_like(samples, _SAMPLE_SEED_WORD), zeros, zeros)
    low, high, _, _ = philox(counter, (seeds & _WORD, seeds >> 32))
    return torch.where(samples == 0, seeds, (low | high << 32) & _SEED_MASK)
