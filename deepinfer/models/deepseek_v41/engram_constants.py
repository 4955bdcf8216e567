"""Hash constants of the n-gram memory (engram): moduli, row offsets and multipliers of each engram layer.

Source: the rule of the released `inference/engram.py`; the values of the released configuration are held by a test.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_SEED_STEP = 10007


@dataclasses.dataclass(frozen=True, slots=True)
class EngramConstants:
    """Constants of one engram layer.

    `primes[order][head]`: modulus of n-gram length `order + 2` and `head`, which is also the number of table rows of
    that pair. `offsets[order][head]`: first row of that pair in the layer's table. `multipliers[s]`: odd factor of
    the compressed token id `s` positions back, s = 0 .. max n-gram length - 1. `num_rows`: rows of the table.
    """

    layer_id: int
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    multipliers: tuple[int, ...]
    num_rows: int


def build_engram_constants(
    layer_ids: tuple[int, ...], *, vocab_size: int, num_heads: int, max_ngram_size: int, num_classes: int
) -> tuple[EngramConstants, ...]:
    """Return the constants of all engram layers, in the order of `layer_ids`.

    Moduli are the primes from `vocab_size` upwards, each used once, walking layers, then n-gram lengths 2 .. max, then
    heads. Multipliers come from numpy's `default_rng(10007 * layer)` and keep multiplier * id below 2**63 for every
    id below `num_classes`.
    """
    prime = vocab_size - 1
    constants = []
    for layer_id in layer_ids:
        primes, offsets, num_rows = [], [], 0
        for _ in range(max_ngram_size - 1):
            row_primes, row_offsets = [], []
            for _ in range(num_heads):
                prime = _next_prime(prime)
                row_primes.append(prime)
                row_offsets.append(num_rows)
                num_rows += prime
            primes.append(tuple(row_primes))
            offsets.append(tuple(row_offsets))
        multipliers = _multipliers(layer_id, max_ngram_size, num_classes)
        constants.append(EngramConstants(layer_id, tuple(primes), tuple(offsets), multipliers, num_rows))
    return tuple(constants)


def _multipliers(layer_id: int, count: int, num_classes: int) -> tuple[int, ...]:
    bound = (2**63 - 1) // num_classes // 2
    draws = np.random.default_rng(_SEED_STEP * layer_id).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(draw) * 2 + 1 for draw in draws)


def _next_prime(number: int) -> int:
    """Return the smallest prime above `number`."""
    candidate = max(number + 1, 2)
    while not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True
