"""Sampling in Triton: shared noise and arg-max in one pass over the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel

_SPLITS = 8
_CALLS = 256


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 < x, accurate near 0: the quotient undoes the rounding of 1 + x."""
    one = 1.0 + x
    return tl.where(one == 1.0, x, tl.log(one) * tl.div_rn(x, tl.where(one == 1.0, 1.0, one - 1.0)))


@triton.jit
def _gumbel(word):
    """-log(-log(1 - u)), u = (word + 1/2) / 2^32 at most 1 - 2^-24, from an int64 word, in float32.

    1 - u is formed from the word's complement where u is large: both tails keep their bits.
    """
    small = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = tl.maximum(((4294967295 - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 5.9604644775390625e-08)
    return -tl.log(-tl.where(word < 2147483648, _log1p(-small), tl.log(rest)))


@triton.jit
def _better(score, temperature, word, token, inside, best, best_token):
    divisor = tl.where(temperature == 0, 1.0, temperature)
    noise = tl.where(temperature == 0, 0.0, _gumbel(word.to(tl.int64)))
    value = tl.where(inside, tl.div_rn(score, divisor) + noise, float("-inf"))
    won = inside & ((value > best) | (best_token < 0))
    return tl.where(won, value, best), tl.where(won, token, best_token)


@triton.jit
def _draw_kernel(
    scores_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    best_ptr,
    token_ptr,
    vocabulary,
    split_calls,
    PURPOSE: tl.constexpr,
    SPLITS: tl.constexpr,
    CALLS: tl.constexpr,
):
    """One program: one range of one row. A lane keeps the lowest token of its best value."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (((position >> 32) & 0xFFFFFF) | (PURPOSE << 24)).to(tl.uint32)
    best = tl.full((CALLS,), float("-inf"), tl.float32)
    best_token = tl.full((CALLS,), -1, tl.int32)
    for start in range(0, split_calls, CALLS):
        calls = split * split_calls + start + tl.arange(0, CALLS)
        owned = start + tl.arange(0, CALLS) < split_calls
        counter = calls.to(tl.uint32)
        a, b, c, d = tl.philox(seed, counter, counter * 0 + low, counter * 0 + high, counter * 0)
        tokens = calls * 4
        row_ptr = scores_ptr + row * vocabulary + tokens
        for word in tl.static_range(4):
            inside = owned & (tokens + word < vocabulary)
            score = tl.load(row_ptr + word, mask=inside, other=float("-inf"))
            bits = a if word == 0 else (b if word == 1 else (c if word == 2 else d))
            best, best_token = _better(score, temperature, bits, tokens + word, inside, best, best_token)
    largest = tl.max(best, 0)
    token = tl.min(tl.where((best == largest) & (best_token >= 0), best_token, 2147483647), 0)
    tl.store(best_ptr + row * SPLITS + split, largest)
    tl.store(token_ptr + row * SPLITS + split, tl.where(token == 2147483647, 0, token))


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, *, purpose: int) -> Tensor:
    """`ops.GumbelArgmax`. The noise is computed in float32: a draw can differ from the reference at a near-tie."""
    num_rows, vocabulary = scores.shape
    best = torch.empty(num_rows, _SPLITS, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(num_rows, _SPLITS, dtype=torch.int32, device=scores.device)
    if not num_rows:
        return tokens[:, 0].long()
    split_calls = triton.cdiv(triton.cdiv(vocabulary, 4), _SPLITS)
    _draw_kernel[(num_rows, _SPLITS)](
        scores.contiguous(),
        seeds,
        positions,
        temperatures,
        best,
        tokens,
        vocabulary,
        split_calls,
        PURPOSE=purpose,
        SPLITS=_SPLITS,
        CALLS=_CALLS,
    )
    # ranges ascend, and the first of equal maxima is the lower token
    return tokens.gather(1, best.argmax(1, keepdim=True)).squeeze(1).long()


IMPLEMENTATIONS = (triton_kernel("gumbel_argmax", lambda _: gumbel_argmax),)
