"""Sampling in Triton: shared noise and arg-max in one pass over the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel

_SPLITS = 8
_CALLS = 256
_COMBINED_ROWS = 32
_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _log2(x, PLAIN: tl.constexpr):
    """Base-2 logarithm of normal float32 values: the unit's own, within 2^-22 absolute near 1, relative elsewhere."""
    if PLAIN:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _gumbel(words, PLAIN: tl.constexpr):
    """-log(-log(1 - u)), u = (word + 1/2) / 2^32 at most 1 - 2^-24, from uint32 words, in float32.

    1 - u is formed from the word's complement where u is large: both tails keep their bits. -log(1 - u) is a series
    below 1/8.
    """
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    tail = u * (0.2 + u * (0.16666667163372040 + u * 0.14285714924335480))
    series = u + u * u * (0.5 + u * (0.33333334326744080 + u * (0.25 + tail)))
    exponential = tl.where(
        u < 0.125, series, -0.69314718055994530942 * _log2(tl.maximum(rest, 5.9604644775390625e-08), PLAIN)
    )
    return -0.69314718055994530942 * _log2(exponential, PLAIN)


@triton.jit
def _divide(x, divisor, PLAIN: tl.constexpr):
    """x / divisor (a scalar), correctly rounded; NaN instead of an infinity where the divisor is of ordinary size.

    The true reciprocal, then two corrections by the remainder, as in the machine's own division but without its checks.
    """
    if PLAIN:
        quotient = tl.div_rn(x, divisor + tl.zeros_like(x))
    elif (divisor > 1e-6) & (divisor < 1e6):
        reciprocal = tl.div_rn(1.0, divisor)
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
        quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    else:
        quotient = tl.div_rn(x, divisor + tl.zeros_like(x))
    return quotient


@triton.jit
def _draw_kernel(
    scores_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    bias_ptr,
    best_ptr,
    token_ptr,
    row_stride,
    vocabulary,
    split_calls,
    PURPOSE: tl.constexpr,
    SPLITS: tl.constexpr,
    CALLS: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """One program: one range of one row. Each place keeps the lowest token of its best value; no number beats all."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (((position >> 32) & 0xFFFFFF) | (PURPOSE << 24)).to(tl.uint32)
    words = tl.arange(0, 4)[None, :]
    end = tl.minimum((split + 1) * split_calls * 4, vocabulary)
    best = tl.full((CALLS, 4), float("-inf"), tl.float32)
    best_token = tl.full((CALLS, 4), _NO_TOKEN, tl.int32)
    for start in range(split * split_calls, (split + 1) * split_calls, CALLS):
        calls = start + tl.arange(0, CALLS)
        tokens = calls[:, None] * 4 + words
        score = tl.load(scores_ptr + row * row_stride + tokens, mask=tokens < end, other=float("-inf")).to(tl.float32)
        if WITH_BIAS:
            score += tl.load(bias_ptr + row * vocabulary + tokens, mask=tokens < end, other=0.0)
        value = score
        if temperature > 0:
            counter = calls.to(tl.uint32)
            a, b, c, d = tl.philox(seed, counter, counter * 0 + low, counter * 0 + high, counter * 0)
            drawn = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (CALLS, 4))
            value = _divide(score, temperature, PLAIN) + _gumbel(drawn, PLAIN)
        value = tl.where(score < float("inf"), value, float("inf"))
        won = value > best
        best, best_token = tl.where(won, value, best), tl.where(won, tokens, best_token)
    largest = tl.max(tl.max(best, 1), 0)
    token = tl.min(tl.min(tl.where(best == largest, best_token, _NO_TOKEN), 1), 0)
    tl.store(best_ptr + row * SPLITS + split, largest)
    tl.store(token_ptr + row * SPLITS + split, token)


@triton.jit
def _combine_kernel(best_ptr, token_ptr, out_ptr, num_rows, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """The lowest token of the best value of each row's ranges; -1 where that is no finite number."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = rows[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    inside = (rows < num_rows)[:, None]
    best = tl.load(best_ptr + place, mask=inside, other=float("-inf"))
    tokens = tl.load(token_ptr + place, mask=inside, other=_NO_TOKEN)
    largest = tl.max(best, 1)
    token = tl.min(tl.where(best == largest[:, None], tokens, _NO_TOKEN), 1)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(out_ptr + rows, tl.where(is_finite, token, -1).to(tl.int64), mask=rows < num_rows)


def gumbel_argmax(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    *,
    purpose: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`ops.GumbelArgmax`. The noise is computed in float32: a draw can differ from the reference at a near-tie."""
    num_rows, vocabulary = scores.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if not num_rows:
        return out
    best = torch.empty(num_rows, _SPLITS, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(num_rows, _SPLITS, dtype=torch.int32, device=scores.device)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    _draw_kernel[(num_rows, _SPLITS)](
        scores,
        seeds,
        positions,
        temperatures,
        scores if bias is None else bias.contiguous(),
        best,
        tokens,
        scores.stride(0),
        vocabulary,
        triton.cdiv(triton.cdiv(vocabulary, 4), _SPLITS),
        PURPOSE=purpose,
        SPLITS=_SPLITS,
        CALLS=_CALLS,
        WITH_BIAS=bias is not None,
        PLAIN=not scores.is_cuda,
    )
    _combine_kernel[(triton.cdiv(num_rows, _COMBINED_ROWS),)](
        best, tokens, out, num_rows, SPLITS=_SPLITS, ROWS=_COMBINED_ROWS
    )
    return out


IMPLEMENTATIONS = (triton_kernel("gumbel_argmax", lambda _: gumbel_argmax),)
